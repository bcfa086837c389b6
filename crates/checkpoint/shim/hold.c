/*
 * A copy of a process, by fork: its pages are those of the process until that writes to them, so that the copy is made in
 * 20 us a MB and costs what is written meanwhile.
 *
 * The process must not notice. Its first thread makes a short-lived helper that shares its memory and files, and that one
 * makes the copy: when the helper ends the copy is a child of the sandbox's init, which reaps it, and no child of the
 * process's, which would find it (as a zombie without a signal, at every wait(2) that asks for all). The process reaps the
 * helper itself before it goes on. All of these are system calls that are put into it, by single steps over the instruction in
 * its vDSO; its filters of system calls are suspended meanwhile.
 *
 * The copies stand in ptrace stops and end with this process (PTRACE_O_EXITKILL). They close their files at once: the end of a
 * connection must not wait for them.
 */
#define _GNU_SOURCE
#include "hold.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef SYS_close_range
#define SYS_close_range 436
#endif
/* The largest vDSO there is has two pages. */
#define MOST_VDSO 16384

static ptrace_fn trace;

/* A thread that stands still, as it was. */
struct thread {
	pid_t pid;
	struct user_regs_struct regs;
	/* Where the program has an instruction that enters the kernel. */
	unsigned long entry;
};

static unsigned long find_entry(pid_t pid)
{
	static unsigned char code[MOST_VDSO];
	char path[64], line[512];
	unsigned long from, to, found = 0;
	ssize_t length = 0, i;
	FILE *maps;
	int memory;

	snprintf(path, sizeof(path), "/proc/%d/maps", pid);
	maps = fopen(path, "re");
	if (!maps)
		return 0;
	while (fgets(line, sizeof(line), maps))
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

/* Waits until it stops for this event, 0 for the end of a step; EAGAIN if it is the end of a step instead. */
static int stops_for(pid_t pid, int event)
{
	int status;

	while (waitpid(pid, &status, __WALL) < 0)
		if (errno != EINTR)
			return errno;
	if (!WIFSTOPPED(status))
		return ESRCH;
	if (status >> 8 == (SIGTRAP | event << 8))
		return 0;
	if (status >> 8 == SIGTRAP)
		return EAGAIN;
	/* A signal that no mask holds back: it comes again when the program goes on. */
	if (!(status >> 16))
		syscall(SYS_tgkill, pid, pid, WSTOPSIG(status));
	return EINTR;
}

/* Has a thread make a system call; if that is to make a child, gives that too, as it is numbered here. */
static int call(const struct thread *of, long number, const unsigned long *arguments, long *result, pid_t *child)
{
	struct user_regs_struct regs = of->regs;
	unsigned long message;
	int failed, made_none = 0;

	regs.rip = of->entry;
	regs.rax = (unsigned long)number;
	regs.orig_rax = (unsigned long)-1;
	regs.rdi = arguments[0];
	regs.rsi = arguments[1];
	regs.rdx = arguments[2];
	regs.r10 = arguments[3];
	regs.r8 = 0;
	if (trace(PTRACE_SETREGS, of->pid, NULL, &regs) || trace(PTRACE_SINGLESTEP, of->pid, NULL, NULL))
		return errno;
	if (child) {
		failed = stops_for(of->pid, PTRACE_EVENT_CLONE);
		made_none = failed == EAGAIN;
		if (!failed && trace(PTRACE_GETEVENTMSG, of->pid, NULL, &message))
			failed = errno;
		if (!failed) {
			*child = (pid_t)message;
			if (trace(PTRACE_SINGLESTEP, of->pid, NULL, NULL))
				failed = errno;
		}
		if (failed && !made_none)
			return failed;
	}
	failed = made_none ? 0 : stops_for(of->pid, 0);
	if (!failed && trace(PTRACE_GETREGS, of->pid, NULL, &regs))
		failed = errno;
	*result = (long)regs.rax;
	/* A limit of processes or of memory. */
	return made_none && !failed ? (int)-*result : failed;
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
	int failed = stops_for(child->pid, PTRACE_EVENT_STOP);

	child->entry = parent->entry;
	if (!failed && (trace(PTRACE_GETREGS, child->pid, NULL, &child->regs) ||
			trace(PTRACE_SETOPTIONS, child->pid, NULL,
			      (void *)(PTRACE_O_EXITKILL | PTRACE_O_TRACECLONE | PTRACE_O_SUSPEND_SECCOMP))))
		failed = errno;
	return failed;
}

/* The copy, made by the helper. */
static int copy(const struct thread *helper, struct thread *holder)
{
	const unsigned long nothing[4] = { 0 }, all[4] = { 0, ~0U, 0, 0 };
	long result;
	int failed;

	holder->pid = 0;
	failed = call(helper, SYS_clone, nothing, &result, &holder->pid);
	if (!failed)
		failed = take(holder, helper);
	if (!failed)
		failed = call(holder, SYS_close_range, all, &result, NULL);
	if (!failed && result < 0)
		failed = (int)-result;
	if (failed && holder->pid) {
		end(holder->pid);
		holder->pid = 0;
	}
	return failed;
}

static int hold_one(pid_t pid, pid_t *holder)
{
	struct thread first = { .pid = pid }, helper = { 0 }, held = { 0 };
	unsigned long arguments[4] = { CLONE_VM | CLONE_FILES | CLONE_FS, 0, 0, 0 };
	uint64_t mask, all = ~0ULL;
	long result = 0, reaped;
	int failed;

	first.entry = find_entry(pid);
	if (!first.entry)
		return ENOEXEC;
	if (trace(PTRACE_GETREGS, pid, NULL, &first.regs) ||
	    trace(PTRACE_GETSIGMASK, pid, (void *)sizeof(mask), &mask) ||
	    trace(PTRACE_SETSIGMASK, pid, (void *)sizeof(all), &all) ||
	    trace(PTRACE_SETOPTIONS, pid, NULL, (void *)(PTRACE_O_TRACECLONE | PTRACE_O_SUSPEND_SECCOMP)))
		return errno;
	failed = call(&first, SYS_clone, arguments, &result, &helper.pid);
	if (helper.pid) {
		if (!failed)
			failed = take(&helper, &first);
		if (!failed)
			failed = copy(&helper, &held);
		end(helper.pid);
		arguments[0] = (unsigned long)result;
		arguments[1] = 0;
		arguments[2] = __WALL;
		if (call(&first, SYS_wait4, arguments, &reaped, NULL) || reaped != result)
			failed = failed ? failed : ECHILD;
	}
	/* Whatever came of it. */
	trace(PTRACE_SETREGS, pid, NULL, &first.regs);
	trace(PTRACE_SETSIGMASK, pid, (void *)sizeof(mask), &mask);
	trace(PTRACE_SETOPTIONS, pid, NULL, NULL);
	if (failed && held.pid)
		end(held.pid);
	*holder = held.pid;
	return failed;
}

int hold(ptrace_fn real_ptrace, const uint32_t *pids, uint32_t count, uint32_t *holders)
{
	uint32_t made;
	int failed = 0;

	trace = real_ptrace;
	for (made = 0; made < count && !failed; made++) {
		pid_t holder = 0;

		failed = hold_one((pid_t)pids[made], &holder);
		holders[made] = (uint32_t)holder;
	}
	while (failed && made--)
		if (holders[made])
			end((pid_t)holders[made]);
	return failed;
}
