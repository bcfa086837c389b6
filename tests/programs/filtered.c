/* Waits of processes that have a system call filter of their own, which kills one that calls what it did not expect.
 *
 * Answers each client of port 7000 with a line "NAME COUNT EARLIEST_US LATEST_US" per wait, and closes: how often the wait has
 * ended by its time-out of two seconds, and by how much it was late at least and at most. */
#define _GNU_SOURCE
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "listen.h"

#define WHOLE_MS 2000

static int epoll;
static const struct timespec whole = { WHOLE_MS / 1000, 0 };

static long wait_epoll_wait(void) { struct epoll_event e; return syscall(SYS_epoll_wait, epoll, &e, 1, WHOLE_MS); }
static long wait_epoll_pwait(void) { struct epoll_event e; return syscall(SYS_epoll_pwait, epoll, &e, 1, WHOLE_MS, NULL, 8); }
static long wait_poll(void) { struct pollfd p = { epoll, POLLIN, 0 }; return syscall(SYS_poll, &p, 1, WHOLE_MS); }
static long wait_nanosleep(void) { return syscall(SYS_nanosleep, &whole, NULL); }

static const struct { const char *name; long (*wait)(void); } kinds[] = {
	{ "epoll_wait", wait_epoll_wait }, { "epoll_pwait", wait_epoll_pwait }, { "poll", wait_poll }, { "nanosleep", wait_nanosleep },
};
enum { KINDS = sizeof kinds / sizeof *kinds };

static struct { volatile uint64_t count; volatile int64_t earliest, latest; } *shared;

static int64_t now_us(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000LL + t.tv_nsec / 1000;
}

static void filter(void)
{
#define KILL(call) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS)
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		KILL(SYS_epoll_pwait2), KILL(SYS_ppoll), KILL(SYS_pause),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { sizeof code / sizeof *code, code };
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
		_exit(1);
}

static void go(int kind)
{
	filter();
	for (shared[kind].earliest = WHOLE_MS * 1000LL;;) {
		int64_t late, began = now_us();
		if (kinds[kind].wait() != 0)
			_exit(1);
		late = now_us() - began - WHOLE_MS * 1000LL;
		if (late < shared[kind].earliest)
			shared[kind].earliest = late;
		if (late > shared[kind].latest)
			shared[kind].latest = late;
		shared[kind].count++;
	}
}

int main(void)
{
	int kind, listener;
	shared = mmap(NULL, KINDS * sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	epoll = epoll_create1(0);
	for (kind = 0; kind < KINDS; kind++)
		if (!fork())
			go(kind);
	listener = listen_7000();
	for (;;) {
		int client = accept(listener, NULL, NULL);
		for (kind = 0; kind < KINDS; kind++)
			dprintf(client, "%s %llu %lld %lld\n", kinds[kind].name, (unsigned long long)shared[kind].count,
				(long long)shared[kind].earliest, (long long)shared[kind].latest);
		close(client);
	}
}
