/* One process hands something over to another, which waited for it: a client's line on port 7000 has its answer when that one has it.
 *
 * A line is KIND MS. The second process takes what there is one of, has the first wait for it too, works for MS milliseconds, lets
 * go of it and waits for what the first one says. Kinds: mutex, in shared memory; flock, ofd, lock: of a file, by flock(2), and by
 * fcntl(2) with F_OFD_SETLKW and with F_SETLKW; semaphore: of System V. The first process has so many threads that it takes a while
 * to stop all of them. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/sem.h>
#include <time.h>
#include <unistd.h>

#include "listen.h"

enum { THREADS = 300, FIRST = 0, SECOND = 1 };

struct shared {
	pthread_mutex_t mutex;
	char kind[16]; /* what the line says */
};

static struct shared *shared;
static int asks[2], says[2], set, file[2];

static void take(int process)
{
	struct flock all = { .l_type = F_WRLCK };
	struct sembuf down = { .sem_op = -1 };
	int bad = 0;
	if (!strcmp(shared->kind, "mutex"))
		bad = pthread_mutex_lock(&shared->mutex);
	else if (!strcmp(shared->kind, "flock"))
		bad = flock(file[process], LOCK_EX);
	else if (!strcmp(shared->kind, "ofd"))
		bad = fcntl(file[process], F_OFD_SETLKW, &all);
	else if (!strcmp(shared->kind, "lock"))
		bad = fcntl(file[process], F_SETLKW, &all);
	else
		bad = semop(set, &down, 1);
	if (bad)
		exit(2);
}

static void let_go(int process)
{
	struct flock all = { .l_type = F_UNLCK };
	struct sembuf up = { .sem_op = 1 };
	int bad = 0;
	if (!strcmp(shared->kind, "mutex"))
		bad = pthread_mutex_unlock(&shared->mutex);
	else if (!strcmp(shared->kind, "flock"))
		bad = flock(file[process], LOCK_UN);
	else if (!strcmp(shared->kind, "ofd"))
		bad = fcntl(file[process], F_OFD_SETLK, &all);
	else if (!strcmp(shared->kind, "lock"))
		bad = fcntl(file[process], F_SETLK, &all);
	else
		bad = semop(set, &up, 1);
	if (bad)
		exit(3);
}

static void work(long ms)
{
	struct timespec at;
	long until;
	clock_gettime(CLOCK_MONOTONIC, &at);
	until = at.tv_sec * 1000 + at.tv_nsec / 1000000 + ms;
	do
		clock_gettime(CLOCK_MONOTONIC, &at);
	while (at.tv_sec * 1000 + at.tv_nsec / 1000000 < until);
}

static void *wait_for_ever(void *nothing)
{
	for (;;)
		pause();
	return nothing;
}

/* The one that waits. */
static void first(void)
{
	char byte;
	while (read(asks[0], &byte, 1) == 1) {
		take(FIRST);
		let_go(FIRST);
		if (write(says[1], "x", 1) != 1)
			exit(4);
	}
	exit(5);
}

/* The one that clients ask. */
static void last(void)
{
	int client, listener = listen_7000();
	char line[64], byte;
	long ms;
	while ((client = accept(listener, NULL, NULL)) >= 0) {
		FILE *lines = fdopen(client, "r+");
		while (fgets(line, sizeof line, lines) && sscanf(line, "%15s %ld", shared->kind, &ms) == 2) {
			take(SECOND);
			if (write(asks[1], "x", 1) != 1)
				exit(6);
			work(ms);
			let_go(SECOND);
			if (read(says[0], &byte, 1) != 1)
				exit(7);
			fprintf(lines, "done\n");
			fflush(lines);
			fseek(lines, 0, SEEK_CUR);
		}
		fclose(lines);
	}
	exit(8);
}

int main(void)
{
	pthread_mutexattr_t attributes;
	pthread_attr_t small;
	pthread_t thread;
	struct sembuf up = { .sem_op = 1 };
	int n;
	shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	pthread_mutexattr_init(&attributes);
	pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
	pthread_mutex_init(&shared->mutex, &attributes);
	set = semget(IPC_PRIVATE, 1, 0600);
	if (pipe(asks) || pipe(says) || set < 0 || semop(set, &up, 1))
		return 1;
	for (n = FIRST; n <= SECOND; n++)
		if ((file[n] = open("/tmp/handed", O_RDWR | O_CREAT, 0600)) < 0)
			return 1;
	pthread_attr_init(&small);
	pthread_attr_setstacksize(&small, 64 << 10);
	/* Two processes: a lock of fcntl(2) is one's. */
	if (fork() == 0)
		last();
	for (n = 0; n < THREADS; n++)
		pthread_create(&thread, &small, wait_for_ever, NULL);
	first();
	return 1;
}
