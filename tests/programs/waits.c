/*
 * Every wait with a clock that Linux has, all begun at once, each in a thread or process of its own.
 *
 * waits SECONDS: each writes a line when it is over, `NAME CLOCK ENDED MONO REAL BOOT`: the clock that it is on (m: CLOCK_MONOTONIC,
 * o: another), how it ended (0: by its time-out), and how long it took on each of three clocks, microseconds; then `all over`.
 * waits now: the clocks, nanoseconds.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define NS 1000000000LL
/* Expirations of one that has an interval. */
#define BEATS 12

static long long length_ns;
static sem_t running;

static long long now(clockid_t clock)
{
	struct timespec t;

	clock_gettime(clock, &t);
	return t.tv_sec * NS + t.tv_nsec;
}

static struct timespec span(long long ns)
{
	return (struct timespec){ ns / NS, ns % NS };
}

static struct timespec until(clockid_t clock)
{
	return span(now(clock) + length_ns);
}

/* Waits return 0 if their time-out ended them. */
static int timed_out(long rc)
{
	return rc == 0 ? 0 : errno;
}

static int w_nanosleep_call(void)
{
	struct timespec t = span(length_ns);
	return timed_out(syscall(SYS_nanosleep, &t, NULL));
}

static int sleep_on(clockid_t clock, int flags)
{
	struct timespec t = flags ? until(clock) : span(length_ns);
	return clock_nanosleep(clock, flags, &t, NULL);
}

static int w_sleep(void) { struct timespec t = span(length_ns); return timed_out(nanosleep(&t, NULL)); }
static int w_sleep_mono(void) { return sleep_on(CLOCK_MONOTONIC, 0); }
static int w_sleep_mono_abs(void) { return sleep_on(CLOCK_MONOTONIC, TIMER_ABSTIME); }
static int w_sleep_real(void) { return sleep_on(CLOCK_REALTIME, 0); }
static int w_sleep_real_abs(void) { return sleep_on(CLOCK_REALTIME, TIMER_ABSTIME); }
static int w_sleep_boot(void) { return sleep_on(CLOCK_BOOTTIME, 0); }
static int w_sleep_boot_abs(void) { return sleep_on(CLOCK_BOOTTIME, TIMER_ABSTIME); }
static int w_sleep_tai_abs(void) { return sleep_on(CLOCK_TAI, TIMER_ABSTIME); }

static int w_poll(void) { return timed_out(poll(NULL, 0, length_ns / 1000000)); }
static int w_ppoll(void) { struct timespec t = span(length_ns); return timed_out(ppoll(NULL, 0, &t, NULL)); }
static int w_select(void)
{
	struct timeval t = { length_ns / NS, length_ns % NS / 1000 };
	return timed_out(select(0, NULL, NULL, NULL, &t));
}
static int w_pselect(void) { struct timespec t = span(length_ns); return timed_out(pselect(0, NULL, NULL, NULL, &t, NULL)); }
static int w_epoll_wait(void)
{
	struct epoll_event e;
	return timed_out(epoll_wait(epoll_create1(0), &e, 1, length_ns / 1000000));
}
static int w_epoll_pwait(void)
{
	struct epoll_event e;
	sigset_t all;
	sigfillset(&all);
	sigdelset(&all, SIGTERM);
	return timed_out(epoll_pwait(epoll_create1(0), &e, 1, length_ns / 1000000, &all));
}
static int w_epoll_pwait2(void)
{
	struct epoll_event e;
	struct timespec t = span(length_ns);
	return timed_out(syscall(441, epoll_create1(0), &e, 1, &t, NULL, 0));
}

static int futex(int op, struct timespec t)
{
	static int word;
	long rc = syscall(SYS_futex, &word, op | FUTEX_PRIVATE_FLAG, 0, &t, NULL, FUTEX_BITSET_MATCH_ANY);
	return rc == -1 && errno == ETIMEDOUT ? 0 : rc == -1 ? errno : -1;
}
static int w_futex(void) { return futex(FUTEX_WAIT, span(length_ns)); }
static int w_futex_mono_abs(void) { return futex(FUTEX_WAIT_BITSET, until(CLOCK_MONOTONIC)); }
static int w_futex_real_abs(void) { return futex(FUTEX_WAIT_BITSET | FUTEX_CLOCK_REALTIME, until(CLOCK_REALTIME)); }

static int semaphore(clockid_t clock)
{
	struct timespec t = until(clock);
	sem_t s;
	sem_init(&s, 0, 0);
	return sem_clockwait(&s, clock, &t) == -1 && errno == ETIMEDOUT ? 0 : errno;
}
static int w_sem_mono(void) { return semaphore(CLOCK_MONOTONIC); }
static int w_sem_real(void) { return semaphore(CLOCK_REALTIME); }

static int condition(clockid_t clock)
{
	struct timespec t = until(clock);
	pthread_mutex_t m = PTHREAD_MUTEX_INITIALIZER;
	pthread_cond_t c;
	pthread_condattr_t a;
	pthread_condattr_init(&a);
	pthread_condattr_setclock(&a, clock);
	pthread_cond_init(&c, &a);
	pthread_mutex_lock(&m);
	int rc = pthread_cond_timedwait(&c, &m, &t);
	return rc == ETIMEDOUT ? 0 : rc;
}
static int w_cond_mono(void) { return condition(CLOCK_MONOTONIC); }
static int w_cond_real(void) { return condition(CLOCK_REALTIME); }

static int timerfd(clockid_t clock, int flags, long long every)
{
	int fd = timerfd_create(clock, 0);
	struct itimerspec t = { span(every), flags ? until(clock) : span(length_ns) };
	long long wanted = 1, seen = 0, began = now(clock), passed;
	unsigned long long n;

	if (every) {
		wanted = BEATS;
		t.it_value = span((flags ? now(clock) : 0) + every);
	}
	timerfd_settime(fd, flags, &t, NULL);
	while (seen < wanted) {
		if (read(fd, &n, sizeof(n)) != sizeof(n))
			return errno;
		seen += n;
	}
	/* Of a program that goes on late more periods may be over: as many as have passed, no more. */
	passed = every ? (now(clock) - began) / every : wanted;
	return seen == wanted || (seen <= passed && seen >= passed - 1) ? 0 : -(int)seen;
}
static int w_timerfd_mono(void) { return timerfd(CLOCK_MONOTONIC, 0, 0); }
static int w_timerfd_mono_abs(void) { return timerfd(CLOCK_MONOTONIC, TFD_TIMER_ABSTIME, 0); }
static int w_timerfd_mono_every(void) { return timerfd(CLOCK_MONOTONIC, 0, length_ns / BEATS); }
static int w_timerfd_real(void) { return timerfd(CLOCK_REALTIME, 0, 0); }
static int w_timerfd_real_abs(void) { return timerfd(CLOCK_REALTIME, TFD_TIMER_ABSTIME, 0); }
static int w_timerfd_boot(void) { return timerfd(CLOCK_BOOTTIME, 0, 0); }
static int w_timerfd_boot_abs(void) { return timerfd(CLOCK_BOOTTIME, TFD_TIMER_ABSTIME, 0); }
static int w_timerfd_boot_every(void) { return timerfd(CLOCK_BOOTTIME, 0, length_ns / BEATS); }

static int posix(clockid_t clock, int flags, int number)
{
	struct sigevent event = { .sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGRTMIN + number };
	struct itimerspec t = { { 0, 0 }, flags ? until(clock) : span(length_ns) };
	timer_t timer;
	sigset_t set;

	sigemptyset(&set);
	sigaddset(&set, SIGRTMIN + number);
	if (timer_create(clock, &event, &timer) || timer_settime(timer, flags, &t, NULL))
		return errno;
	return sigwaitinfo(&set, NULL) == SIGRTMIN + number ? 0 : errno;
}
static int w_posix_mono(void) { return posix(CLOCK_MONOTONIC, 0, 1); }
static int w_posix_mono_abs(void) { return posix(CLOCK_MONOTONIC, TIMER_ABSTIME, 2); }
static int w_posix_real_abs(void) { return posix(CLOCK_REALTIME, TIMER_ABSTIME, 3); }
static int w_posix_boot(void) { return posix(CLOCK_BOOTTIME, 0, 4); }
static int w_posix_boot_abs(void) { return posix(CLOCK_BOOTTIME, TIMER_ABSTIME, 5); }

static int w_sigtimedwait(void)
{
	struct timespec t = span(length_ns);
	sigset_t set;

	sigemptyset(&set);
	sigaddset(&set, SIGRTMIN + 9);
	return sigtimedwait(&set, NULL, &t) == -1 && errno == EAGAIN ? 0 : errno;
}

static int w_rcvtimeo(void)
{
	struct timeval t = { length_ns / NS, length_ns % NS / 1000 };
	int fd = socket(AF_INET, SOCK_DGRAM, 0);
	char byte;

	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &t, sizeof(t));
	return recv(fd, &byte, 1, 0) == -1 && errno == EAGAIN ? 0 : errno;
}

static int w_sndtimeo(void)
{
	struct timeval t = { length_ns / NS, length_ns % NS / 1000 };
	char bytes[4096] = { 0 };
	int fds[2];

	socketpair(AF_UNIX, SOCK_STREAM, 0, fds);
	/* To the last byte: CRIU sends what is queued anew, in other pieces, and there may be more room than before. */
	while (send(fds[0], bytes, sizeof(bytes), MSG_DONTWAIT) > 0)
		;
	while (send(fds[0], bytes, 1, MSG_DONTWAIT) > 0)
		;
	setsockopt(fds[0], SOL_SOCKET, SO_SNDTIMEO, &t, sizeof(t));
	if (send(fds[0], bytes, 1, 0) != -1)
		return -1;
	return errno == EAGAIN ? 0 : errno;
}

static int alarmed(void)
{
	sigset_t set;
	int signal;

	sigemptyset(&set);
	sigaddset(&set, SIGALRM);
	return sigwait(&set, &signal);
}
static int w_alarm(void) { alarm(length_ns / NS); return alarmed(); }
static int w_itimer(void)
{
	struct itimerval t = { { 0, 0 }, { length_ns / NS, length_ns % NS / 1000 } };
	setitimer(ITIMER_REAL, &t, NULL);
	return alarmed();
}
static struct wait {
	const char *name, *clock;
	int (*wait)(void);
	int own_process;
} waits[] = {
#define M(name) { #name, "m", w_##name, 0 }
#define O(name) { #name, "o", w_##name, 0 }
#define P(name) { #name, "m", w_##name, 1 }
	M(sleep), M(nanosleep_call), M(sleep_mono), M(sleep_mono_abs), M(sleep_real), O(sleep_real_abs), O(sleep_boot),
	O(sleep_boot_abs), O(sleep_tai_abs), M(poll), M(ppoll), M(select), M(pselect), M(epoll_wait), M(epoll_pwait),
	M(epoll_pwait2), M(futex), M(futex_mono_abs), O(futex_real_abs), M(sem_mono), O(sem_real), M(cond_mono), O(cond_real),
	M(timerfd_mono), M(timerfd_mono_abs), M(timerfd_mono_every), M(timerfd_real), O(timerfd_real_abs), O(timerfd_boot),
	O(timerfd_boot_abs), O(timerfd_boot_every), M(posix_mono), M(posix_mono_abs), O(posix_real_abs), O(posix_boot),
	O(posix_boot_abs), M(sigtimedwait), M(rcvtimeo), M(sndtimeo), P(alarm), P(itimer),
};
#define COUNT (int)(sizeof(waits) / sizeof(waits[0]))

static void *run(void *argument)
{
	struct wait *w = argument;
	long long mono = now(CLOCK_MONOTONIC), real = now(CLOCK_REALTIME), boot = now(CLOCK_BOOTTIME);
	char line[200];
	int ended;

	sem_post(&running);
	ended = w->wait();
	mono = now(CLOCK_MONOTONIC) - mono;
	real = now(CLOCK_REALTIME) - real;
	boot = now(CLOCK_BOOTTIME) - boot;
	snprintf(line, sizeof(line), "%s %s %d %lld %lld %lld\n", w->name, w->clock, ended, mono / 1000, real / 1000, boot / 1000);
	if (write(1, line, strlen(line)) < 0)
		abort();
	return NULL;
}

int main(int argc, char **argv)
{
	pthread_t threads[COUNT];
	sigset_t all;

	if (argc < 2 || !strcmp(argv[1], "now")) {
		printf("%lld %lld %lld\n", now(CLOCK_MONOTONIC), now(CLOCK_REALTIME), now(CLOCK_BOOTTIME));
		return 0;
	}
	length_ns = atoll(argv[1]) * NS;
	sigfillset(&all);
	sigdelset(&all, SIGTERM);
	sigprocmask(SIG_BLOCK, &all, NULL);
	sem_init(&running, 0, 0);
	for (int i = 0; i < COUNT; i++) {
		if (!waits[i].own_process) {
			pthread_create(&threads[i], NULL, run, &waits[i]);
			sem_wait(&running);
		} else if (fork() == 0) {
			run(&waits[i]);
			_exit(0);
		}
	}
	printf("all begun\n");
	fflush(stdout);
	for (int i = 0; i < COUNT; i++)
		if (!waits[i].own_process)
			pthread_join(threads[i], NULL);
	while (wait(NULL) > 0)
		;
	printf("all over\n");
	fflush(stdout);
	pause();
	return 0;
}
