/* Timers that expire all the time: interval timers in processes of their own, POSIX timers, timerfds, at several periods each.
 *
 * Answers each client of port 7000 with a line "KIND PERIOD_MS COUNT ELAPSED_US" per timer, and closes. A count is how often
 * the program was told: by a call that a signal has ended, by a signal and its overruns, by what a timerfd has counted.
 * itimer_once arms a timer anew each time it has expired, and hangs if it is not told once. virtual and prof count CPU time. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include "listen.h"

static const int periods[] = { 7, 20, 50, 100 };
enum { PERIODS = sizeof periods / sizeof *periods };
enum kind { ITIMER, ITIMER_ONCE, VIRTUAL, PROF, POSIX, TIMERFD, KINDS };
static const char *names[] = { "itimer", "itimer_once", "virtual", "prof", "posix", "timerfd" };

static struct shared {
	volatile uint64_t count[KINDS][PERIODS];
	volatile int64_t armed_us[KINDS][PERIODS];
} *shared;

static volatile sig_atomic_t told;

static int counts_cpu(int kind) { return kind == VIRTUAL || kind == PROF; }

/* The kernel charges CPU time by ticks of some milliseconds, at random for work that is shorter: with less of it a timer may not
 * expire for many seconds. */
enum { WORK_US = 2000 };

/* What counts CPU time has the short periods only, for it does little. */
static int is_there(int kind, int period) { return !counts_cpu(kind) || period < 2; }

static int64_t now_us(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000LL + t.tv_nsec / 1000;
}

static void tell(int signal) { (void)signal; told = 1; }

static void arm(enum kind kind, int period)
{
	static const int which[] = { ITIMER_REAL, ITIMER_REAL, ITIMER_VIRTUAL, ITIMER_PROF };
	struct timeval t = { 0, periods[period] * 1000 };
	struct itimerval value = { .it_value = t };
	if (kind != ITIMER_ONCE)
		value.it_interval = t;
	setitimer(which[kind], &value, NULL);
}

/* The signal is let in by the wait only, so that none comes between two. */
static void interval_timer(enum kind kind, int period)
{
	static const int signals[] = { SIGALRM, SIGALRM, SIGVTALRM, SIGPROF };
	struct sigaction action = { .sa_handler = tell };
	struct epoll_event event;
	sigset_t set, none;
	int epoll = epoll_create1(0), cpu = counts_cpu(kind);
	sigaction(signals[kind], &action, NULL);
	sigemptyset(&none);
	sigemptyset(&set);
	sigaddset(&set, signals[kind]);
	if (!cpu)
		sigprocmask(SIG_BLOCK, &set, NULL);
	shared->armed_us[kind][period] = now_us();
	for (arm(kind, period);;) {
		if (cpu)
			for (int64_t end = now_us() + WORK_US; now_us() < end;)
				;
		epoll_pwait(epoll, &event, 1, cpu ? 20 : -1, &none);
		if (told) {
			told = 0;
			shared->count[kind][period]++;
			if (kind == ITIMER_ONCE)
				arm(kind, period);
		}
	}
}

static void posix(int period)
{
	timer_t timer;
	sigset_t set;
	siginfo_t info;
	struct sigevent event = { .sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGRTMIN };
	struct timespec t = { 0, periods[period] * 1000000 };
	struct itimerspec value = { t, t };
	sigemptyset(&set);
	sigaddset(&set, SIGRTMIN);
	sigprocmask(SIG_BLOCK, &set, NULL);
	shared->armed_us[POSIX][period] = now_us();
	if (timer_create(CLOCK_MONOTONIC, &event, &timer) || timer_settime(timer, 0, &value, NULL))
		_exit(1);
	for (;;)
		if (sigwaitinfo(&set, &info) == SIGRTMIN)
			shared->count[POSIX][period] += 1 + info.si_overrun;
}

static void descriptors(void)
{
	struct pollfd fds[PERIODS];
	uint64_t times;
	int n;
	for (n = 0; n < PERIODS; n++) {
		struct timespec t = { 0, periods[n] * 1000000 };
		struct itimerspec value = { t, t };
		fds[n] = (struct pollfd){ timerfd_create(CLOCK_MONOTONIC, 0), POLLIN, 0 };
		shared->armed_us[TIMERFD][n] = now_us();
		timerfd_settime(fds[n].fd, 0, &value, NULL);
	}
	for (;;) {
		if (poll(fds, PERIODS, -1) <= 0)
			_exit(1);
		for (n = 0; n < PERIODS; n++)
			if (fds[n].revents && read(fds[n].fd, &times, 8) == 8)
				shared->count[TIMERFD][n] += times;
	}
}

int main(void)
{
	int kind, period, listener;
	shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	for (kind = 0; kind < TIMERFD; kind++)
		for (period = 0; period < PERIODS; period++)
			if (is_there(kind, period) && !fork())
				kind == POSIX ? posix(period) : interval_timer(kind, period);
	if (!fork())
		descriptors();
	listener = listen_7000();
	for (;;) {
		int client = accept(listener, NULL, NULL);
		for (kind = 0; kind < KINDS; kind++)
			for (period = 0; period < PERIODS; period++)
				if (is_there(kind, period))
					dprintf(client, "%s %d %llu %lld\n", names[kind], periods[period],
						(unsigned long long)shared->count[kind][period],
						(long long)(now_us() - shared->armed_us[kind][period]));
		close(client);
	}
}
