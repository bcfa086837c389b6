/* System V IPC of every kind, used by two processes and checked: segments that are private, keyed, of another owner, deleted, attached
 * twice, attached to read only, split by mprotect(2), or attached by none; semaphores; a message queue. With an argument one segment
 * has a hole as well.
 *
 * Answers each line on a connection to port 7000 with "ok" or what is wrong, and changes all of it for the next time. After the line
 * "strict" it looks as well at what CRIU does not restore: creators, the size of the queue, deleted segments, read-only attachments
 * of what is attached otherwise too. */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/msg.h>
#include <sys/prctl.h>
#include <sys/sem.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <unistd.h>

#include "listen.h"

#define PAGE 4096
#define PRIVATE_SIZE (3 * PAGE + 100)
#define KEYED_SIZE (16 * PAGE)
#define LARGE_SIZE (6 * 1024 * PAGE)
enum { KEYED = 0x4b1, ALONE = 0x4b2, SEMS = 0x4b3, QUEUE = 0x4b4, CREATOR = 5, OWNER = 7, GROUP = 8, SEM_COUNT = 5, VERDICT = 9 };
enum { GO, FIRST_VALUE };

struct text {
	long type;
	char text[3000];
};

static int private_id, keyed_id, deleted_id, alone_id, large_id, sems, queue;
static unsigned char *private, *keyed, *read_only, *deleted, *large;
static unsigned long attached[3];
static int round_now, has_hole;
static char wrong[4096];

static void expect(int good, const char *format, ...)
{
	if (good)
		return;
	size_t length = strlen(wrong);
	va_list rest;
	va_start(rest, format);
	vsnprintf(wrong + length, sizeof wrong - length, format, rest);
	va_end(rest);
	strncat(wrong, "; ", sizeof wrong - strlen(wrong) - 1);
}

static void must(int good, const char *what)
{
	if (good)
		return;
	perror(what);
	exit(1);
}

static unsigned char byte_of(int seed, size_t at)
{
	return (unsigned char)(seed * 31 + at / 7 + at);
}

static void fill(unsigned char *memory, size_t size, int seed)
{
	for (size_t i = 0; i < size; i++)
		memory[i] = byte_of(seed, i);
}

static int is_filled(const unsigned char *memory, size_t from, size_t to, int seed)
{
	for (size_t i = from; i < to; i++)
		if (memory[i] != byte_of(seed, i))
			return 0;
	return 1;
}

static void *attach(int id, int flags)
{
	void *memory = shmat(id, NULL, flags);
	must(memory != (void *)-1, "shmat");
	return memory;
}

static unsigned long attachments(int id)
{
	struct shmid_ds about;
	return shmctl(id, IPC_STAT, &about) ? 0 : about.shm_nattch;
}

/* Both processes have these. */
static void check_shared(void)
{
	expect(is_filled(private, 0, PRIVATE_SIZE, round_now), "private memory");
	expect(is_filled(deleted, 0, PAGE, 100 + round_now), "deleted memory");
	expect(private[4 * PAGE - 1] == 0xee, "what is behind the end of a segment, in its last page");
}

static void check_keyed(int strict)
{
	expect(is_filled(keyed, 0, 2 * PAGE, 200 + round_now), "keyed memory");
	expect(is_filled(keyed, 5 * PAGE, KEYED_SIZE, 200 + round_now), "keyed memory behind a protected page");
	expect(is_filled(read_only, 0, KEYED_SIZE, 200 + round_now), "read-only memory");
	unsigned char there[1];
	expect(!has_hole || (mincore(keyed + 4 * PAGE, PAGE, there) && errno == ENOMEM), "the hole");
	expect(!strict || (mprotect(read_only, KEYED_SIZE, PROT_READ | PROT_WRITE) && errno == EACCES), "read-only memory that can be written to");
	/* One that was protected can be opened again. */
	expect(!mprotect(keyed + PAGE, PAGE, PROT_READ | PROT_WRITE), "protected memory");
	keyed[PAGE] ^= 0xff;
	expect(read_only[PAGE] == keyed[PAGE], "two attachments of one segment");
	keyed[PAGE] ^= 0xff;
	mprotect(keyed + PAGE, PAGE, PROT_READ);
	int fds[2];
	must(!pipe(fds), "pipe");
	expect(write(fds[1], keyed + 2 * PAGE, 1) < 0 && errno == EFAULT, "memory that cannot be read");
	expect(read(fds[0], keyed + PAGE, 0) == 0, "a pipe");
	close(fds[0]), close(fds[1]);
	struct shmid_ds about;
	expect(!shmctl(keyed_id, IPC_STAT, &about), "keyed segment");
	expect(about.shm_perm.uid == OWNER && about.shm_perm.gid == GROUP, "owner %u:%u", about.shm_perm.uid, about.shm_perm.gid);
	expect((about.shm_perm.mode & 0777) == 0666 && about.shm_segsz == KEYED_SIZE, "mode %o, size %zu", about.shm_perm.mode, about.shm_segsz);
	expect(shmget(KEYED, 0, 0) == keyed_id, "key of a segment");
}

static void check_alone(void)
{
	expect(shmget(ALONE, 0, 0) == alone_id && attachments(alone_id) == 0, "a segment that no process has attached");
	unsigned char *memory = attach(alone_id, 0);
	expect(is_filled(memory, 0, PAGE, 300 + round_now), "memory that no process has attached");
	fill(memory, PAGE, 300 + round_now + 1);
	expect(attachments(alone_id) == 1 && !shmdt(memory) && attachments(alone_id) == 0, "attachments");
}

static void check_attached(int strict)
{
	unsigned long now[3] = { attachments(private_id), attachments(keyed_id), attachments(deleted_id) };
	for (int i = 0; i < 3; i++)
		expect(now[i] == attached[i], "segment %d is attached %lu times in place of %lu", i, now[i], attached[i]);
	struct shmid_ds about;
	if (!strict)
		return;
	expect(!shmctl(deleted_id, IPC_STAT, &about) && about.shm_perm.mode & SHM_DEST, "deleted segment that stays");
	expect(!shmctl(keyed_id, IPC_STAT, &about) && about.shm_perm.cuid == CREATOR, "creator %u", about.shm_perm.cuid);
	/* A detached one is gone all at once, whatever it was split into. */
	expect(!shmdt(large) && attachments(large_id) == 0, "%lu pieces of a segment are left", attachments(large_id));
	large = shmat(large_id, large, 0);
	expect(large != (void *)-1, "its place");
	mprotect(large + 7 * PAGE, PAGE, PROT_READ);
}

static void check_sems(void)
{
	expect(semget(SEMS, 0, 0) == sems, "key of semaphores");
	for (int i = FIRST_VALUE; i < SEM_COUNT; i++) {
		int value = semctl(sems, i, GETVAL);
		expect(value == 1000 * i + round_now, "semaphore %d is %d", i, value);
		struct sembuf up = { (unsigned short)i, 1, 0 };
		expect(!semop(sems, &up, 1), "semop");
	}
	struct semid_ds about;
	expect(!semctl(sems, 0, IPC_STAT, &about) && about.sem_nsems == SEM_COUNT && (about.sem_perm.mode & 0777) == 0600, "semaphores");
}

static void send_messages(int round)
{
	struct text message = { 3, "" };
	memset(message.text, 'a' + round % 26, sizeof message.text);
	must(!msgsnd(queue, &message, sizeof message.text, IPC_NOWAIT), "msgsnd");
	message.type = 4;
	must(!msgsnd(queue, &message, 0, IPC_NOWAIT), "msgsnd");
	message.type = 3;
	must(!msgsnd(queue, &message, 5, IPC_NOWAIT), "msgsnd");
}

static void check_queue(int strict)
{
	struct text message;
	struct msqid_ds about;
	expect(msgget(QUEUE, 0) == queue && !msgctl(queue, IPC_STAT, &about), "key of a queue");
	expect(about.msg_qnum == 3 && (!strict || about.msg_qbytes == 12345), "%lu messages in %lu bytes", about.msg_qnum, about.msg_qbytes);
	expect(msgrcv(queue, &message, sizeof message.text, 4, IPC_NOWAIT) == 0, "message without text");
	expect(msgrcv(queue, &message, sizeof message.text, 3, IPC_NOWAIT) == sizeof message.text, "long message");
	expect(message.text[sizeof message.text - 1] == 'a' + round_now % 26, "its text");
	expect(msgrcv(queue, &message, sizeof message.text, 0, IPC_NOWAIT) == 5, "short message");
	expect(msgrcv(queue, &message, sizeof message.text, 0, IPC_NOWAIT) < 0 && errno == ENOMSG, "another message");
	send_messages(round_now + 1);
}

/* Checks when a semaphore says so, and says by a message what it has found. */
static void second(void)
{
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	for (round_now = 1;; round_now++) {
		struct sembuf down = { GO, -1, 0 };
		struct text verdict = { VERDICT, "" };
		must(!semop(sems, &down, 1), "semop");
		wrong[0] = 0;
		check_shared();
		snprintf(verdict.text, sizeof verdict.text, "%.2900s", wrong);
		fill(deleted, PAGE, 100 + round_now + 1);
		must(!msgsnd(queue, &verdict, strlen(verdict.text) + 1, 0), "msgsnd");
	}
}

static void check(int strict)
{
	struct sembuf up = { GO, 1, 0 };
	struct text verdict;
	wrong[0] = 0;
	check_shared();
	check_keyed(strict);
	check_alone();
	check_attached(strict);
	check_sems();
	check_queue(strict);
	expect(is_filled(large, 0, LARGE_SIZE, 400), "large memory");
	expect(!semop(sems, &up, 1), "semop");
	expect(msgrcv(queue, &verdict, sizeof verdict.text, VERDICT, 0) > 0, "verdict");
	expect(!verdict.text[0], "the other process: %s", verdict.text);
	/* The other one has filled the deleted one, and sees what is filled here. */
	round_now++;
	fill(private, PRIVATE_SIZE, round_now);
	mprotect(keyed, 4 * PAGE, PROT_READ | PROT_WRITE);
	unsigned char *whole = attach(keyed_id, 0);
	fill(whole, KEYED_SIZE, 200 + round_now);
	shmdt(whole);
	mprotect(keyed + PAGE, PAGE, PROT_READ);
	mprotect(keyed + 2 * PAGE, PAGE, PROT_NONE);
}

static void make(void)
{
	struct shmid_ds about;
	struct msqid_ds of_queue;
	/* So that the numbers are none that a new namespace begins with. */
	for (int i = 0; i < 3; i++)
		shmctl(shmget(IPC_PRIVATE, PAGE, 0600), IPC_RMID, NULL), semctl(semget(IPC_PRIVATE, 1, 0600), 0, IPC_RMID);
	must(!setegid(CREATOR) && !seteuid(CREATOR), "seteuid");
	keyed_id = shmget(KEYED, KEYED_SIZE, IPC_CREAT | 0666);
	must(!shmctl(keyed_id, IPC_STAT, &about), "keyed segment");
	about.shm_perm.uid = OWNER, about.shm_perm.gid = GROUP;
	must(!shmctl(keyed_id, IPC_SET, &about), "its owner");
	must(!seteuid(0) && !setegid(0), "seteuid");
	private_id = shmget(IPC_PRIVATE, PRIVATE_SIZE, 0600);
	deleted_id = shmget(IPC_PRIVATE, PAGE, 0600);
	alone_id = shmget(ALONE, PAGE, IPC_CREAT | 0600);
	large_id = shmget(IPC_PRIVATE, LARGE_SIZE, 0600);
	sems = semget(SEMS, SEM_COUNT, IPC_CREAT | 0600);
	queue = msgget(QUEUE, IPC_CREAT | 0600);
	must(private_id >= 0 && deleted_id >= 0 && alone_id >= 0 && sems >= 0 && queue >= 0, "System V IPC");
	private = attach(private_id, 0), keyed = attach(keyed_id, 0), read_only = attach(keyed_id, SHM_RDONLY), deleted = attach(deleted_id, 0);
	must(!shmctl(deleted_id, IPC_RMID, NULL), "IPC_RMID");
	fill(private, PRIVATE_SIZE, 1), fill(deleted, PAGE, 101), fill(keyed, KEYED_SIZE, 201);
	private[4 * PAGE - 1] = 0xee;
	unsigned char *alone = attach(alone_id, 0);
	fill(alone, PAGE, 301);
	shmdt(alone);
	for (int i = FIRST_VALUE; i < SEM_COUNT; i++)
		must(!semctl(sems, i, SETVAL, 1000 * i + 1), "SETVAL");
	must(!semctl(sems, GO, SETVAL, 0), "SETVAL");
	must(!msgctl(queue, IPC_STAT, &of_queue), "queue");
	of_queue.msg_qbytes = 12345;
	must(!msgctl(queue, IPC_SET, &of_queue), "its size");
	send_messages(1);
	round_now = 1;
	if (fork() == 0)
		second();
	large = attach(large_id, 0);
	fill(large, LARGE_SIZE, 400);
	mprotect(large + 7 * PAGE, PAGE, PROT_READ);
	mprotect(keyed + PAGE, PAGE, PROT_READ);
	mprotect(keyed + 2 * PAGE, PAGE, PROT_NONE);
	if (has_hole)
		munmap(keyed + 4 * PAGE, PAGE);
	attached[0] = attachments(private_id), attached[1] = attachments(keyed_id), attached[2] = attachments(deleted_id);
}

int main(int count, char **words)
{
	(void)words;
	has_hole = count > 1;
	make();
	int listener = listen_7000();
	for (;;) {
		FILE *client = fdopen(accept(listener, NULL, NULL), "r+");
		char line[100];
		while (fgets(line, sizeof line, client)) {
			check(!strncmp(line, "strict", 6));
			fseek(client, 0, SEEK_CUR);
			fprintf(client, "%s\n", wrong[0] ? wrong : "ok");
			fflush(client);
		}
		fclose(client);
	}
}
