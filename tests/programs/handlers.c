/* Waits of every kind that the handler of a signal ends, each in a process of its own with an interval timer.
 *
 * Answers each client of port 7000 with a line "NAME TOLD EINTR OTHER" per wait, and closes: how often its handler ran, how
 * often its wait ended with EINTR, and how often it ended otherwise. No wait is over before its timer expires. Those that begin
 * with "again_" have a handler with SA_RESTART, and are never ended.
 *
 * With an argument it sleeps once, until an alarm so many seconds later, and prints by how many microseconds the kernel was wrong about
 * what was left: nanosleep(2) and clock_nanosleep(2). */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/sem.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include "listen.h"

#define PERIOD_US 400000
#define WHOLE_S 20

static const struct timespec whole = { WHOLE_S, 0 };
static int epoll, pipes[2], pair[2], timed[2], sems, word;
static sigset_t none, usr;

static long wait_epoll_wait(void) { struct epoll_event e; return syscall(SYS_epoll_wait, epoll, &e, 1, WHOLE_S * 1000); }
static long wait_epoll_pwait(void) { struct epoll_event e; return syscall(SYS_epoll_pwait, epoll, &e, 1, WHOLE_S * 1000, &none, 8); }
static long wait_epoll_pwait2(void) { struct epoll_event e; return syscall(SYS_epoll_pwait2, epoll, &e, 1, &whole, &none, 8); }
static long wait_epoll_endless(void) { struct epoll_event e; return syscall(SYS_epoll_wait, epoll, &e, 1, -1); }
static long wait_poll(void) { struct pollfd p = { pipes[0], POLLIN, 0 }; return syscall(SYS_poll, &p, 1, WHOLE_S * 1000); }
static long wait_ppoll(void) { struct pollfd p = { pipes[0], POLLIN, 0 }; struct timespec t = whole; return syscall(SYS_ppoll, &p, 1, &t, NULL, 8); }
static long wait_select(void) { fd_set s; struct timeval t = { WHOLE_S, 0 }; FD_ZERO(&s); FD_SET(pipes[0], &s); return syscall(SYS_select, pipes[0] + 1, &s, NULL, NULL, &t); }
static long wait_pselect(void) { fd_set s; struct timespec t = whole; FD_ZERO(&s); FD_SET(pipes[0], &s); return syscall(SYS_pselect6, pipes[0] + 1, &s, NULL, NULL, &t, NULL); }
static long wait_nanosleep(void) { return syscall(SYS_nanosleep, &whole, NULL); }
static long wait_clock_nanosleep(void) { return syscall(SYS_clock_nanosleep, CLOCK_MONOTONIC, 0, &whole, NULL); }
static long wait_until(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); t.tv_sec += WHOLE_S; return syscall(SYS_clock_nanosleep, CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL); }
static long wait_futex(void) { return syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, 0, &whole, NULL, 0); }
static long wait_futex_until(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); t.tv_sec += WHOLE_S; return syscall(SYS_futex, &word, FUTEX_WAIT_BITSET_PRIVATE, 0, &t, NULL, -1); }
static long wait_futex_endless(void) { return syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, 0, NULL, NULL, 0); }
static long wait_sigtimedwait(void) { return syscall(SYS_rt_sigtimedwait, &usr, NULL, &whole, 8); }
static long wait_semtimedop(void) { struct sembuf b = { 0, -1, 0 }; return syscall(SYS_semtimedop, sems, &b, 1, &whole); }
static long wait_semop(void) { struct sembuf b = { 0, -1, 0 }; return syscall(SYS_semtimedop, sems, &b, 1, NULL); }
static long wait_pause(void) { return syscall(SYS_pause); }
static long wait_sigsuspend(void) { return syscall(SYS_rt_sigsuspend, &none, 8); }
static long wait_read(void) { char c; return read(pipes[0], &c, 1); }
static long wait_recv(void) { char c; return recv(pair[0], &c, 1, 0); }
static long wait_recv_timed(void) { char c; return recv(timed[0], &c, 1, 0); }

static const struct { const char *name; long (*wait)(void); int flags; } kinds[] = {
	{ "epoll_wait", wait_epoll_wait, 0 }, { "epoll_pwait", wait_epoll_pwait, SA_RESTART },
	{ "epoll_pwait2", wait_epoll_pwait2, 0 }, { "epoll_endless", wait_epoll_endless, SA_RESTART },
	{ "poll", wait_poll, 0 }, { "ppoll", wait_ppoll, SA_RESTART }, { "select", wait_select, 0 },
	{ "pselect", wait_pselect, 0 }, { "nanosleep", wait_nanosleep, SA_RESTART },
	{ "clock_nanosleep", wait_clock_nanosleep, 0 }, { "until", wait_until, 0 }, { "futex", wait_futex, SA_RESTART },
	{ "futex_until", wait_futex_until, 0 }, { "futex_endless", wait_futex_endless, 0 },
	{ "sigtimedwait", wait_sigtimedwait, SA_RESTART }, { "semtimedop", wait_semtimedop, SA_RESTART },
	{ "semop", wait_semop, 0 }, { "pause", wait_pause, SA_RESTART }, { "sigsuspend", wait_sigsuspend, SA_RESTART },
	{ "read", wait_read, 0 }, { "recv", wait_recv, 0 }, { "recv_timed", wait_recv_timed, SA_RESTART },
	{ "again_read", wait_read, SA_RESTART }, { "again_recv", wait_recv, SA_RESTART },
	{ "again_futex", wait_futex_endless, SA_RESTART },
};
enum { KINDS = sizeof kinds / sizeof *kinds };

static struct { volatile uint64_t told, interrupted, other; } *shared, *mine;

static void tell(int signal) { (void)signal; mine->told++; }

static void go(int kind)
{
	struct sigaction action = { .sa_handler = tell, .sa_flags = kinds[kind].flags };
	struct itimerval timer = { { 0, PERIOD_US }, { 0, PERIOD_US } };
	mine = shared + kind;
	sigaction(SIGALRM, &action, NULL);
	setitimer(ITIMER_REAL, &timer, NULL);
	for (;;) {
		if (kinds[kind].wait() == -1 && errno == EINTR)
			mine->interrupted++;
		else
			mine->other++;
	}
}

static void ignore(int signal) { (void)signal; }

static int64_t now_us(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000LL + t.tv_nsec / 1000;
}

static void sleep_once(const char *name, int seconds, int by_clock)
{
	struct timespec left = whole;
	struct sigaction action = { .sa_handler = ignore };
	int64_t began = now_us();
	long done;
	sigaction(SIGALRM, &action, NULL);
	alarm(seconds);
	done = by_clock ? syscall(SYS_clock_nanosleep, CLOCK_MONOTONIC, 0, &whole, &left) : syscall(SYS_nanosleep, &whole, &left);
	printf("%s %d %lld\n", name, done == -1 ? errno : 0,
		(long long)(left.tv_sec * 1000000LL + left.tv_nsec / 1000 - (WHOLE_S * 1000000LL - (now_us() - began))));
	fflush(stdout);
}

int main(int argc, char **argv)
{
	struct timeval receive = { WHOLE_S, 0 };
	if (argc > 1) {
		if (!fork())
			return sleep_once("nanosleep", atoi(argv[1]), 0), pause();
		return sleep_once("clock_nanosleep", atoi(argv[1]), 1), pause();
	}
	int kind, listener;
	shared = mmap(NULL, KINDS * sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	sigemptyset(&none);
	sigemptyset(&usr);
	sigaddset(&usr, SIGUSR1);
	epoll = epoll_create1(0);
	sems = semget(IPC_PRIVATE, 1, 0600);
	if (sems < 0 || pipe(pipes) || socketpair(AF_UNIX, SOCK_STREAM, 0, pair) || socketpair(AF_UNIX, SOCK_STREAM, 0, timed))
		return 1;
	setsockopt(timed[0], SOL_SOCKET, SO_RCVTIMEO, &receive, sizeof receive);
	for (kind = 0; kind < KINDS; kind++)
		if (!fork())
			go(kind);
	listener = listen_7000();
	for (;;) {
		int client = accept(listener, NULL, NULL);
		for (kind = 0; kind < KINDS; kind++)
			dprintf(client, "%s %llu %llu %llu\n", kinds[kind].name, (unsigned long long)shared[kind].told,
				(unsigned long long)shared[kind].interrupted, (unsigned long long)shared[kind].other);
		close(client);
	}
}
