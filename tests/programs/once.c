/* Timers that are set for once, in a process with so much memory that a snapshot of it takes a while.
 *
 * Answers a client on port 7000 that sends a line: "arm" sets all timers, MS apart, "told" gives a line "KIND NUMBER COUNT" for each,
 * how often the program was told that it has expired. Kinds: alarm, setitimer(2); process and thread, timer_create(2) with a signal
 * of its own each; function, with SIGEV_THREAD, for which the C library has one signal. */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include "listen.h"

enum { EACH = 14, ALARM = 2 * EACH, FUNCTION, ALL, MS = 12 };
static const char *kinds[] = { "process", "thread", "alarm", "function" };
static volatile int told[ALL];
static timer_t timers[ALL];
static volatile pid_t waiter;

static void function(union sigval value) { told[value.sival_int]++; }

/* Takes the signals of the process, or its own. */
static void *wait_for_signals(void *own)
{
	sigset_t set;
	siginfo_t info;
	int n;
	sigemptyset(&set);
	for (n = 0; n < EACH; n++)
		sigaddset(&set, SIGRTMIN + (own ? EACH : 0) + n);
	if (!own)
		sigaddset(&set, SIGALRM);
	else
		waiter = gettid();
	for (;;) {
		int signal = sigwaitinfo(&set, &info);
		if (signal > 0)
			told[signal == SIGALRM ? ALARM : info.si_value.sival_int]++;
	}
	return NULL;
}

static void arm(void)
{
	int n;
	for (n = 0; n < ALL; n++) {
		/* The last two in the middle, where the memory is read. */
		int ms = MS * (n < ALARM ? 1 + n : ALARM / 2 + n - ALARM);
		struct itimerspec at = { .it_value = { 0, ms * 1000000 } };
		struct itimerval alarm = { .it_value = { 0, ms * 1000 } };
		n == ALARM ? setitimer(ITIMER_REAL, &alarm, NULL) : timer_settime(timers[n], 0, &at, NULL);
	}
}

int main(int count, char **words)
{
	int n, listener;
	size_t size = (size_t)atoi(count > 1 ? words[1] : "1") << 20;
	char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), line[16];
	pthread_t threads[2];
	sigset_t all;
	for (size_t at = 0; at < size; at += 64)
		memory[at] = (char)(1 + at / 64 % 251);
	sigfillset(&all);
	sigprocmask(SIG_BLOCK, &all, NULL);
	for (n = 0; n < 2; n++)
		pthread_create(&threads[n], NULL, wait_for_signals, n ? &threads : NULL);
	while (!waiter)
		usleep(1000);
	for (n = 0; n < ALL; n++) {
		struct sigevent event = { .sigev_signo = SIGRTMIN + n, .sigev_value.sival_int = n };
		event.sigev_notify = n == FUNCTION ? SIGEV_THREAD : n < EACH ? SIGEV_SIGNAL : SIGEV_THREAD_ID;
		if (n == FUNCTION)
			event.sigev_notify_function = function;
		else
			event._sigev_un._tid = waiter;
		if (n != ALARM && timer_create(n % 2 ? CLOCK_MONOTONIC : CLOCK_BOOTTIME, &event, &timers[n]))
			return 1;
	}
	listener = listen_7000();
	for (;;) {
		int client = accept(listener, NULL, NULL);
		if (read(client, line, sizeof line) > 0 && line[0] == 'a')
			arm();
		for (n = 0; n < ALL; n++)
			dprintf(client, "%s %d %d\n", kinds[n < ALARM ? n / EACH : 2 + n - ALARM], n, told[n]);
		close(client);
	}
}
