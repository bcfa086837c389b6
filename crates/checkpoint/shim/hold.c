/*
 * A copy of a process, by fork: its pages are those of the process until that writes to them, so that a copy costs page
 * tables, and what is written meanwhile.
 *
 * The process must not notice. Its first thread makes a short-lived helper that shares its memory and files, and that one
 * makes the copy: when the helper ends the copy is a child of the sandbox's init, which reaps it, and no child of the
 * process's, which would find it (as a zombie without a signal, at every wait(2) that asks for all). The process reaps the
 * helper itself before it goes on. A process that wants to be the parent of such children (PR_SET_CHILD_SUBREAPER) does not
 * while copies are made. All of these are system calls that are put into it, at the instruction for that in its vDSO, from stop
 * to stop of PTRACE_SYSCALL: a single step would send SIGTRAP, which undoes what the process does with that signal. Its filters
 * of system calls are suspended meanwhile.
 *
 * The copies stand in ptrace stops and end with this process (PTRACE_O_EXITKILL). They close their files at once: the end of a
 * connection must not wait for them.
 */
#define _GNU_SOURCE
#include "hold.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef SYS_close_range
#define SYS_close_range 436
#endif
/* The largest vDSO there is has two pages. */
#define MOST_VDSO 16384
/* Below its stack pointer a program may use 128 bytes. */
#define BELOW_STACK 512
#define OPTIONS (PTRACE_O_TRACECLONE | PTRACE_O_SUSPEND_SECCOMP | PTRACE_O_TRACESYSGOOD)
/* A stop before or after a system call. */
#define AT_CALL (SIGTRAP | 0x80)

static ptrace_fn trace;

/* A thread that stands still, as it was. */
struct thread {
	pid_t pid;
	struct user_regs_struct regs;
	/* Where the program has an instruction that enters the kernel. */
	unsigned long entry;
	uint64_t mask;
	/* It can be made to make calls. */
	int ready;
	/* It is the parent of what its descendants leave behind. */
	int adopts;
};

/* Signals that no mask holds back: they come again when the program goes on. */
static struct {
	pid_t pid;
	int signal;
} held_back[64];
static unsigned int held_back_count;

static unsigned long find_entry(pid_t pid)
{
	static unsigned char code[MOST_VDSO];
	char path[64], line[512];
	unsigned long from, to = 0, found = 0;
	ssize_t length = 0, i;
	FILE *maps;
	int memory;

	snprintf(path, sizeof(path), "/proc/%d/maps", pid);
	maps = fopen(path, "re");
	if (!maps)
		return 0;
	while (!found && fgets(line, sizeof(line), maps))
		if (strstr(line, "[vdso]") && sscanf(line, "%lx-%lx", &from, &to) == 2)
			found = from;
	fclose(maps);
	if (!found)
		return 0;
	snprintf(path, sizeof(path), "/proc/%d/mem", pid);
	memory = open(path, O_RDONLY | O_CLOEXEC);
	if (memory >= 0) {
		length = pread(memory, code, sizeof(code) < to - found ? sizeof(code) : to - found, (off_t)found);
		close(memory);
	}
	for (i = 0; i + 1 < length; i++)
		if (code[i] == 0x0f && code[i + 1] == 0x05)
			return found + (unsigned long)i;
	return 0;
}

/* Lets it go on to its next stop before or after a call, or at that event, and waits: how it stopped, or a negative errno. */
static int go_on(pid_t pid, int event)
{
	int status;

	for (;;) {
		if (trace(PTRACE_SYSCALL, pid, NULL, NULL))
			return -errno;
		while (waitpid(pid, &status, __WALL) < 0)
			if (errno != EINTR)
				return -errno;
		if (!WIFSTOPPED(status))
			return -ESRCH;
		if (status >> 8 == AT_CALL || (event && status >> 8 == (SIGTRAP | event << 8)))
			return status >> 8;
		/* Otherwise it is told that something about stops has changed, by SIGCONT. */
		if (!(status >> 16) && held_back_count < sizeof(held_back) / sizeof(*held_back)) {
			held_back[held_back_count].pid = pid;
			held_back[held_back_count++].signal = WSTOPSIG(status);
		}
	}
}

/* Has a thread make a system call; one that is to make a child gives that too, as it is numbered here. Returns an errno. */
static int call(const struct thread *of, long number, const unsigned long *arguments, long *result, pid_t *child)
{
	struct user_regs_struct regs = of->regs;
	unsigned long message;
	int stop;

	regs.rip = of->entry;
	regs.rax = (unsigned long)number;
	regs.orig_rax = (unsigned long)-1;
	regs.rdi = arguments[0];
	regs.rsi = arguments[1];
	regs.rdx = arguments[2];
	regs.r10 = arguments[3];
	regs.r8 = 0;
	if (trace(PTRACE_SETREGS, of->pid, NULL, &regs))
		return errno;
	stop = go_on(of->pid, 0);
	if (stop < 0)
		return -stop;
	stop = go_on(of->pid, child ? PTRACE_EVENT_CLONE : 0);
	if (stop > 0 && stop != AT_CALL) {
		if (trace(PTRACE_GETEVENTMSG, of->pid, NULL, &message))
			return errno;
		*child = (pid_t)message;
		stop = go_on(of->pid, 0);
	}
	if (stop < 0)
		return -stop;
	if (trace(PTRACE_GETREGS, of->pid, NULL, &regs))
		return errno;
	*result = (long)regs.rax;
	/* A limit of processes or of memory. */
	return child && !*child ? (int)-*result : 0;
}

static void end(pid_t pid)
{
	int status;

	kill(pid, SIGKILL);
	while (waitpid(pid, &status, __WALL) == pid && !WIFEXITED(status) && !WIFSIGNALED(status))
		;
}

/* A child that was just made, once it stands still: it never runs on, and ends with this process. */
static int take(struct thread *child, const struct thread *parent)
{
	int status;

	child->entry = parent->entry;
	while (waitpid(child->pid, &status, __WALL) < 0)
		if (errno != EINTR)
			return errno;
	if (!WIFSTOPPED(status) || status >> 8 != (SIGTRAP | PTRACE_EVENT_STOP << 8))
		return ESRCH;
	if (trace(PTRACE_GETREGS, child->pid, NULL, &child->regs) ||
	    trace(PTRACE_SETOPTIONS, child->pid, NULL, (void *)(PTRACE_O_EXITKILL | OPTIONS)))
		return errno;
	return 0;
}

/* Whether a process has file systems mounted that may take long to close a file: those of a network, or of another process. */
static int has_slow_files(pid_t pid)
{
	static const char *const slow[] = { " - nfs", " - cifs", " - smb", " - fuse", " - ceph", " - 9p", " - afs" };
	char path[64], line[4096];
	size_t i;
	int found = 0;
	FILE *mounts;

	snprintf(path, sizeof(path), "/proc/%d/mountinfo", pid);
	mounts = fopen(path, "re");
	if (!mounts)
		return 1;
	while (!found && fgets(line, sizeof(line), mounts))
		for (i = 0; i < sizeof(slow) / sizeof(*slow); i++)
			found |= strstr(line, slow[i]) != NULL;
	fclose(mounts);
	return found;
}

static int close_between(const struct thread *holder, unsigned long first, unsigned long last)
{
	const unsigned long range[4] = { first, last, 0, 0 };
	long result;
	int failed = call(holder, SYS_close_range, range, &result, NULL);

	return failed ? failed : result < 0 ? (int)-result : 0;
}

/* All its files, but for those with a path where some may take long: the end of a connection must not wait for it. */
static int close_files(const struct thread *holder)
{
	char path[64], link[512];
	struct dirent *entry;
	int failed = 0;
	DIR *files;

	if (!has_slow_files(holder->pid))
		return close_between(holder, 0, ~0U);
	snprintf(path, sizeof(path), "/proc/%d/fd", holder->pid);
	files = opendir(path);
	if (!files)
		return errno;
	while (!failed && (entry = readdir(files))) {
		ssize_t length = readlinkat(dirfd(files), entry->d_name, link, sizeof(link));
		unsigned long number = strtoul(entry->d_name, NULL, 10);

		if (length > 0 && link[0] != '/')
			failed = close_between(holder, number, number);
	}
	closedir(files);
	return failed;
}

/* The copy, made by the helper. */
static int copy(const struct thread *helper, struct thread *holder)
{
	const unsigned long nothing[4] = { 0 };
	long result;
	int failed = call(helper, SYS_clone, nothing, &result, &holder->pid);

	if (!failed)
		failed = take(holder, helper);
	if (!failed)
		failed = close_files(holder);
	if (failed && holder->pid) {
		end(holder->pid);
		holder->pid = 0;
	}
	return failed;
}

/* Has a thread say whether its process adopts what its descendants leave behind, and has it not do so. */
static int stop_adopting(struct thread *of)
{
	unsigned long at = (of->regs.rsp - BELOW_STACK) & ~7UL, ask[4] = { PR_GET_CHILD_SUBREAPER, at, 0, 0 };
	const unsigned long set[4] = { PR_SET_CHILD_SUBREAPER, 0, 0, 0 };
	long before, result = 0;
	int failed, said;

	errno = 0;
	before = trace(PTRACE_PEEKDATA, of->pid, (void *)at, &before);
	if (errno)
		return errno;
	failed = call(of, SYS_prctl, ask, &result, NULL);
	errno = 0;
	said = (int)trace(PTRACE_PEEKDATA, of->pid, (void *)at, NULL);
	if (trace(PTRACE_POKEDATA, of->pid, (void *)at, (void *)before) || failed || result)
		return failed ? failed : EIO;
	of->adopts = said != 0;
	return of->adopts ? call(of, SYS_prctl, set, &result, NULL) : 0;
}

static int prepare_thread(struct thread *of, pid_t pid)
{
	const uint64_t all = ~0ULL;

	memset(of, 0, sizeof(*of));
	of->pid = pid;
	of->entry = find_entry(pid);
	if (!of->entry)
		return ENOEXEC;
	if (trace(PTRACE_GETREGS, pid, NULL, &of->regs) || trace(PTRACE_GETSIGMASK, pid, (void *)sizeof(of->mask), &of->mask) ||
	    trace(PTRACE_SETOPTIONS, pid, NULL, (void *)OPTIONS))
		return errno;
	of->ready = 1;
	if (trace(PTRACE_SETSIGMASK, pid, (void *)sizeof(all), (void *)&all))
		return errno;
	return stop_adopting(of);
}

/* Whatever came of it. */
static void put_back(const struct thread *of)
{
	const unsigned long set[4] = { PR_SET_CHILD_SUBREAPER, 1, 0, 0 };
	unsigned int i;
	long result;

	if (!of->ready)
		return;
	if (of->adopts)
		call(of, SYS_prctl, set, &result, NULL);
	trace(PTRACE_SETREGS, of->pid, NULL, (void *)&of->regs);
	trace(PTRACE_SETSIGMASK, of->pid, (void *)sizeof(of->mask), (void *)&of->mask);
	trace(PTRACE_SETOPTIONS, of->pid, NULL, NULL);
	for (i = 0; i < held_back_count; i++)
		if (held_back[i].pid == of->pid)
			syscall(SYS_tgkill, of->pid, of->pid, held_back[i].signal);
}

static int hold_one(const struct thread *first, pid_t *holder)
{
	struct thread helper = { 0 }, held = { 0 };
	unsigned long arguments[4] = { CLONE_VM | CLONE_FILES | CLONE_FS, 0, 0, 0 };
	long inside = 0, reaped = 0;
	int failed = call(first, SYS_clone, arguments, &inside, &helper.pid);

	if (helper.pid) {
		if (!failed)
			failed = take(&helper, first);
		if (!failed)
			failed = copy(&helper, &held);
		end(helper.pid);
		arguments[0] = (unsigned long)inside;
		arguments[1] = 0;
		arguments[2] = __WALL;
		if (inside > 0 && (call(first, SYS_wait4, arguments, &reaped, NULL) || reaped != inside))
			failed = failed ? failed : ECHILD;
	}
	if (failed && held.pid) {
		end(held.pid);
		held.pid = 0;
	}
	*holder = held.pid;
	return failed;
}

int hold(ptrace_fn real_ptrace, const uint32_t *pids, uint32_t count, uint32_t *holders)
{
	struct thread *threads = calloc(count ? count : 1, sizeof(*threads));
	uint32_t i, ready, made = 0;
	int failed = 0;

	if (!threads)
		return ENOMEM;
	trace = real_ptrace;
	held_back_count = 0;
	for (ready = 0; ready < count && !failed; ready++)
		failed = prepare_thread(&threads[ready], (pid_t)pids[ready]);
	for (; made < count && !failed; made++) {
		pid_t holder = 0;

		failed = hold_one(&threads[made], &holder);
		holders[made] = (uint32_t)holder;
	}
	for (i = 0; i < ready; i++)
		put_back(&threads[i]);
	while (failed && made--)
		if (holders[made])
			end((pid_t)holders[made]);
	free(threads);
	return failed;
}
