/* Every call with a time-out that Linux has, each in a thread or process of its own, all for the same time.
 *
 * timed_waits SECONDS: prints "begun", then for each wait a line "NAME RESULT LATE_US" (how it ended, and how much later than it should
 * have; negative: earlier), then "over". A call that this kernel or this sandbox does not have prints "NAME missing 0".
 * Sources: the manual pages of section 2 with a time-out among their arguments, socket(7), and glibc's own waits. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/aio_abi.h>
#include <linux/futex.h>
#include <mqueue.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ipc.h>
#include <sys/select.h>
#include <sys/sem.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static double whole;
static pthread_barrier_t ready;

static double now(clockid_t clock)
{
	struct timespec t;
	clock_gettime(clock, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

static struct timespec spec(double seconds)
{
	struct timespec t = { (time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9) };
	return t;
}

static struct timeval val(double seconds)
{
	struct timeval t = { (time_t)seconds, (long)((seconds - (time_t)seconds) * 1e6) };
	return t;
}

static struct timespec at(clockid_t clock)
{
	return spec(now(clock) + whole);
}

/* As a call of ours ends: 0, or its error. */
static int ended(long result)
{
	return result < 0 ? errno : 0;
}

#define WAIT(name) static int name(void)

WAIT(nanosleep_plain) { struct timespec t = spec(whole); return ended(nanosleep(&t, NULL)); }
WAIT(nanosleep_rest) { struct timespec t = spec(whole), rest; return ended(nanosleep(&t, &rest)); }
WAIT(sleep_same_place) { struct timespec t = spec(whole); return ended(nanosleep(&t, &t)); }
WAIT(nanosleep_raw) { struct timespec t = spec(whole); return ended(syscall(SYS_nanosleep, &t, &t)); }
WAIT(clock_monotonic) { struct timespec t = spec(whole); return clock_nanosleep(CLOCK_MONOTONIC, 0, &t, NULL); }
WAIT(clock_realtime) { struct timespec t = spec(whole); return clock_nanosleep(CLOCK_REALTIME, 0, &t, NULL); }
WAIT(clock_boottime) { struct timespec t = spec(whole); return clock_nanosleep(CLOCK_BOOTTIME, 0, &t, NULL); }
WAIT(clock_tai) { struct timespec t = spec(whole); return clock_nanosleep(CLOCK_TAI, 0, &t, NULL); }
WAIT(until_monotonic) { struct timespec t = at(CLOCK_MONOTONIC); return clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL); }
WAIT(until_realtime) { struct timespec t = at(CLOCK_REALTIME); return clock_nanosleep(CLOCK_REALTIME, TIMER_ABSTIME, &t, NULL); }
WAIT(until_boottime) { struct timespec t = at(CLOCK_BOOTTIME); return clock_nanosleep(CLOCK_BOOTTIME, TIMER_ABSTIME, &t, NULL); }
WAIT(until_tai) { struct timespec t = at(CLOCK_TAI); return clock_nanosleep(CLOCK_TAI, TIMER_ABSTIME, &t, NULL); }
WAIT(poll_nothing) { return ended(poll(NULL, 0, whole * 1000)); }

static int pipe_end(void)
{
	int ends[2];
	return pipe(ends) ? -1 : ends[0];
}

WAIT(poll_pipe) { struct pollfd p = { pipe_end(), POLLIN, 0 }; return ended(poll(&p, 1, whole * 1000)); }
WAIT(poll_raw) { struct pollfd p = { pipe_end(), POLLIN, 0 }; return ended(syscall(SYS_poll, &p, 1, (int)(whole * 1000))); }
WAIT(ppoll_pipe) { struct pollfd p = { pipe_end(), POLLIN, 0 }; struct timespec t = spec(whole); return ended(ppoll(&p, 1, &t, NULL)); }

WAIT(select_pipe)
{
	fd_set set;
	int fd = pipe_end();
	struct timeval t = val(whole);
	FD_ZERO(&set);
	FD_SET(fd, &set);
	return ended(select(fd + 1, &set, NULL, NULL, &t));
}

WAIT(select_raw)
{
	struct timeval t = val(whole);
	long result = syscall(SYS_select, 0, NULL, NULL, NULL, &t);
	return ended(result) ? errno : t.tv_sec || t.tv_usec ? -1 : 0;
}

WAIT(pselect_nothing) { struct timespec t = spec(whole); return ended(pselect(0, NULL, NULL, NULL, &t, NULL)); }

static int epoll_of_pipe(void)
{
	int epoll = epoll_create1(0), fd = pipe_end();
	struct epoll_event event = { EPOLLIN, { .fd = fd } };
	epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event);
	return epoll;
}

WAIT(epoll_ms) { struct epoll_event e; return ended(epoll_wait(epoll_of_pipe(), &e, 1, whole * 1000)); }
WAIT(epoll_raw) { struct epoll_event e; return ended(syscall(SYS_epoll_wait, epoll_of_pipe(), &e, 1, (int)(whole * 1000))); }
WAIT(epoll_mask) { struct epoll_event e; sigset_t s; sigfillset(&s); return ended(epoll_pwait(epoll_of_pipe(), &e, 1, whole * 1000, &s)); }
WAIT(epoll_spec) { struct epoll_event e; struct timespec t = spec(whole); return ended(syscall(SYS_epoll_pwait2, epoll_of_pipe(), &e, 1, &t, NULL, 8)); }

WAIT(futex_wait)
{
	static uint32_t word;
	struct timespec t = spec(whole);
	return ended(syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, 0, &t));
}

static int bitset(int op, clockid_t clock)
{
	static uint32_t word;
	struct timespec t = at(clock);
	return ended(syscall(SYS_futex, &word, op, 0, &t, NULL, FUTEX_BITSET_MATCH_ANY));
}

WAIT(futex_bitset) { return bitset(FUTEX_WAIT_BITSET_PRIVATE, CLOCK_MONOTONIC); }
WAIT(futex_bitset_real) { return bitset(FUTEX_WAIT_BITSET_PRIVATE | FUTEX_CLOCK_REALTIME, CLOCK_REALTIME); }

static int waitv(clockid_t clock)
{
	static uint32_t word;
	struct { uint64_t val, uaddr; uint32_t flags, reserved; } one = { 0, (uintptr_t)&word, 2 | 128, 0 };
	struct timespec t = at(clock);
	return ended(syscall(449, &one, 1, 0, &t, clock));
}

WAIT(futex_waitv_monotonic) { return waitv(CLOCK_MONOTONIC); }
WAIT(futex_waitv_real) { return waitv(CLOCK_REALTIME); }

/* futex_wait(2) of Linux 6.7; before that the others stand for it. */
static int new_wait(clockid_t clock)
{
	static uint32_t word;
	struct timespec t = at(clock);
	long done = syscall(455, &word, 0, ~0u, 2 | 128, &t, clock);
	if (done < 0 && errno == ENOSYS)
		done = syscall(SYS_futex, &word, FUTEX_WAIT_BITSET_PRIVATE | (clock == CLOCK_REALTIME ? FUTEX_CLOCK_REALTIME : 0), 0, &t, 0, ~0u);
	return ended(done);
}

WAIT(futex_new_monotonic) { return new_wait(CLOCK_MONOTONIC); }
WAIT(futex_new_real) { return new_wait(CLOCK_REALTIME); }

/* A lock whose owner is the main thread, which ends last. */
static uint32_t owned;
WAIT(futex_lock_pi) { struct timespec t = at(CLOCK_REALTIME); return ended(syscall(SYS_futex, &owned, FUTEX_LOCK_PI_PRIVATE, 0, &t)); }
WAIT(futex_lock_pi2) { struct timespec t = at(CLOCK_MONOTONIC); return ended(syscall(SYS_futex, &owned, 13 | FUTEX_PRIVATE_FLAG, 0, &t)); }

WAIT(futex_requeue_pi)
{
	static uint32_t word, target;
	struct timespec t = at(CLOCK_MONOTONIC);
	return ended(syscall(SYS_futex, &word, FUTEX_WAIT_REQUEUE_PI_PRIVATE, 0, &t, &target, 0));
}

WAIT(semaphores)
{
	int id = semget(IPC_PRIVATE, 1, 0600);
	struct sembuf one = { 0, -1, 0 };
	struct timespec t = spec(whole);
	int result;
	if (id < 0)
		return -2;
	result = ended(semtimedop(id, &one, 1, &t));
	semctl(id, 0, IPC_RMID);
	return result;
}

WAIT(signals)
{
	sigset_t set;
	struct timespec t = spec(whole);
	sigemptyset(&set);
	sigaddset(&set, SIGUSR2);
	return ended(sigtimedwait(&set, NULL, &t));
}

static mqd_t queue(const char *name)
{
	struct mq_attr attr = { .mq_maxmsg = 1, .mq_msgsize = 8 };
	mqd_t made = mq_open(name, O_RDWR | O_CREAT, 0600, &attr);
	mq_unlink(name);
	return made;
}

WAIT(queue_receive)
{
	char buffer[8];
	mqd_t q = queue("/waits-receive");
	struct timespec t = at(CLOCK_REALTIME);
	return q < 0 ? -2 : ended(mq_timedreceive(q, buffer, 8, NULL, &t));
}

WAIT(queue_send)
{
	mqd_t q = queue("/waits-send");
	struct timespec t = at(CLOCK_REALTIME);
	return q < 0 ? -2 : mq_send(q, "x", 1, 0) ? -2 : ended(mq_timedsend(q, "y", 1, 0, &t));
}

static int aio(int call)
{
	aio_context_t context = 0;
	struct io_event event;
	struct timespec t = spec(whole);
	if (syscall(SYS_io_setup, 1, &context))
		return -2;
	return ended(syscall(call, context, 1, 1, &event, &t, NULL));
}

WAIT(aio_events) { return aio(SYS_io_getevents); }
WAIT(aio_mask) { return aio(SYS_io_pgetevents); }

static int tcp_listener(void)
{
	struct sockaddr_in any = { .sin_family = AF_INET, .sin_addr = { htonl(INADDR_LOOPBACK) } };
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	return bind(fd, (void *)&any, sizeof any) || listen(fd, 5) ? -1 : fd;
}

static int limited(int fd, int option)
{
	struct timeval t = val(whole);
	setsockopt(fd, SOL_SOCKET, option, &t, sizeof t);
	return fd;
}

static int udp(void)
{
	struct sockaddr_in any = { .sin_family = AF_INET, .sin_addr = { htonl(INADDR_LOOPBACK) } };
	int fd = socket(AF_INET, SOCK_DGRAM, 0);
	return bind(fd, (void *)&any, sizeof any) ? -1 : limited(fd, SO_RCVTIMEO);
}

static char big[1 << 20];

static int connected(int *peer)
{
	struct sockaddr_in where;
	socklen_t length = sizeof where;
	int listener = tcp_listener(), fd = socket(AF_INET, SOCK_STREAM, 0);
	getsockname(listener, (void *)&where, &length);
	if (connect(fd, (void *)&where, length))
		return -1;
	*peer = accept(listener, NULL, NULL);
	close(listener);
	return fd;
}

WAIT(socket_accept) { return ended(accept(limited(tcp_listener(), SO_RCVTIMEO), NULL, NULL)); }
WAIT(socket_recv) { char b[8]; return ended(recv(udp(), b, 8, 0)); }
WAIT(socket_read) { char b[8]; return ended(read(udp(), b, 8)); }
WAIT(socket_recvmsg) { char b[8]; struct iovec v = { b, 8 }; struct msghdr m = { .msg_iov = &v, .msg_iovlen = 1 }; return ended(recvmsg(udp(), &m, 0)); }
WAIT(socket_recvmmsg) { char b[8]; struct iovec v = { b, 8 }; struct mmsghdr m = { .msg_hdr = { .msg_iov = &v, .msg_iovlen = 1 } }; return ended(recvmmsg(udp(), &m, 1, 0, NULL)); }
WAIT(socket_tcp) { char b[8]; int peer, fd = connected(&peer); return ended(recv(limited(fd, SO_RCVTIMEO), b, 8, 0)); }

WAIT(socket_unix)
{
	char b[8];
	int ends[2];
	if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends))
		return -2;
	return ended(recv(limited(ends[0], SO_RCVTIMEO), b, 8, 0));
}

WAIT(socket_send)
{
	int ends[2];
	if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends))
		return -2;
	while (send(ends[0], big, sizeof big, MSG_DONTWAIT) > 0)
		;
	while (send(ends[0], big, 1, MSG_DONTWAIT) > 0)
		;
	return ended(send(limited(ends[0], SO_SNDTIMEO), big, 1, 0));
}

static int timer_fd(clockid_t clock, int flags)
{
	uint64_t times;
	struct itimerspec set = { .it_value = flags ? at(clock) : spec(whole) };
	int fd = timerfd_create(clock, 0);
	if (fd < 0 || timerfd_settime(fd, flags, &set, NULL))
		return -2;
	return read(fd, &times, 8) == 8 && times == 1 ? 0 : -1;
}

WAIT(timerfd_monotonic) { return timer_fd(CLOCK_MONOTONIC, 0); }
WAIT(timerfd_realtime) { return timer_fd(CLOCK_REALTIME, 0); }
WAIT(timerfd_boottime) { return timer_fd(CLOCK_BOOTTIME, 0); }
WAIT(timerfd_until_monotonic) { return timer_fd(CLOCK_MONOTONIC, TFD_TIMER_ABSTIME); }
WAIT(timerfd_until_realtime) { return timer_fd(CLOCK_REALTIME, TFD_TIMER_ABSTIME); }
WAIT(timerfd_until_boottime) { return timer_fd(CLOCK_BOOTTIME, TFD_TIMER_ABSTIME); }

static int posix_timer(clockid_t clock, int flags, int which)
{
	int result;
	timer_t timer;
	sigset_t set;
	struct itimerspec value = { .it_value = flags ? at(clock) : spec(whole) };
	struct sigevent event = { .sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGRTMIN + which };
	event._sigev_un._tid = gettid();
	sigemptyset(&set);
	sigaddset(&set, SIGRTMIN + which);
	if (timer_create(clock, &event, &timer) || timer_settime(timer, flags, &value, NULL))
		return -2;
	result = ended(sigwaitinfo(&set, NULL));
	timer_delete(timer);
	return result;
}

WAIT(timer_monotonic) { return posix_timer(CLOCK_MONOTONIC, 0, 1); }
WAIT(timer_realtime) { return posix_timer(CLOCK_REALTIME, 0, 2); }
WAIT(timer_boottime) { return posix_timer(CLOCK_BOOTTIME, 0, 3); }
WAIT(timer_until_realtime) { return posix_timer(CLOCK_REALTIME, TIMER_ABSTIME, 4); }
WAIT(timer_until_boottime) { return posix_timer(CLOCK_BOOTTIME, TIMER_ABSTIME, 5); }

static int alarm_signal(void)
{
	sigset_t set;
	sigemptyset(&set);
	sigaddset(&set, SIGALRM);
	return ended(sigwaitinfo(&set, NULL));
}

/* In a process of its own, for a process has one alarm. */
WAIT(interval_timer)
{
	struct itimerval value = { .it_value = val(whole) };
	setitimer(ITIMER_REAL, &value, NULL);
	return alarm_signal();
}

WAIT(condition)
{
	pthread_mutex_t m = PTHREAD_MUTEX_INITIALIZER;
	pthread_cond_t c = PTHREAD_COND_INITIALIZER;
	struct timespec t = at(CLOCK_REALTIME);
	pthread_mutex_lock(&m);
	return pthread_cond_timedwait(&c, &m, &t);
}

WAIT(condition_monotonic)
{
	pthread_mutex_t m = PTHREAD_MUTEX_INITIALIZER;
	pthread_cond_t c = PTHREAD_COND_INITIALIZER;
	struct timespec t = at(CLOCK_MONOTONIC);
	pthread_mutex_lock(&m);
	return pthread_cond_clockwait(&c, &m, CLOCK_MONOTONIC, &t);
}

WAIT(semaphore) { sem_t s; struct timespec t = at(CLOCK_REALTIME); sem_init(&s, 0, 0); return ended(sem_timedwait(&s, &t)); }
WAIT(semaphore_monotonic) { sem_t s; struct timespec t = at(CLOCK_MONOTONIC); sem_init(&s, 0, 0); return ended(sem_clockwait(&s, CLOCK_MONOTONIC, &t)); }

static pthread_mutex_t taken = PTHREAD_MUTEX_INITIALIZER;
WAIT(mutex) { struct timespec t = at(CLOCK_REALTIME); return pthread_mutex_timedlock(&taken, &t); }

static const struct wait { const char *name; int (*wait)(void); int forks; } waits[] = {
#define ONE(name) { #name, name, 0 }
	ONE(nanosleep_plain), ONE(nanosleep_rest), ONE(sleep_same_place), ONE(nanosleep_raw), ONE(clock_monotonic), ONE(clock_realtime),
	ONE(clock_boottime), ONE(clock_tai), ONE(until_monotonic), ONE(until_realtime), ONE(until_boottime), ONE(until_tai),
	ONE(poll_nothing), ONE(poll_pipe), ONE(poll_raw), ONE(ppoll_pipe), ONE(select_pipe), ONE(select_raw), ONE(pselect_nothing),
	ONE(epoll_ms), ONE(epoll_raw), ONE(epoll_mask), ONE(epoll_spec), ONE(futex_wait), ONE(futex_bitset), ONE(futex_bitset_real),
	ONE(futex_waitv_monotonic), ONE(futex_waitv_real), ONE(futex_new_monotonic), ONE(futex_new_real), ONE(futex_lock_pi), ONE(futex_lock_pi2), ONE(futex_requeue_pi),
	ONE(semaphores), ONE(signals), ONE(queue_receive), ONE(queue_send), ONE(aio_events), ONE(aio_mask),
	ONE(socket_accept), ONE(socket_recv), ONE(socket_read), ONE(socket_recvmsg), ONE(socket_recvmmsg), ONE(socket_tcp),
	ONE(socket_unix), ONE(socket_send), ONE(timerfd_monotonic), ONE(timerfd_realtime), ONE(timerfd_boottime),
	ONE(timerfd_until_monotonic), ONE(timerfd_until_realtime), ONE(timerfd_until_boottime), ONE(timer_monotonic),
	ONE(timer_realtime), ONE(timer_boottime), ONE(timer_until_realtime), ONE(timer_until_boottime), ONE(condition),
	ONE(condition_monotonic), ONE(semaphore), ONE(semaphore_monotonic), ONE(mutex), { "interval_timer", interval_timer, 1 },
};
enum { COUNT = sizeof waits / sizeof *waits };

static int left_out(char **names, const char *name)
{
	for (; *names; names++)
		if (!strcmp(*names, name))
			return 1;
	return 0;
}

static void one(const struct wait *w)
{
	double begin = now(CLOCK_MONOTONIC);
	int result = w->wait();
	double late = now(CLOCK_MONOTONIC) - begin - whole;
	char line[128];
	if (result == -2 || result == ENOSYS || result == EPERM)
		snprintf(line, sizeof line, "%s missing 0\n", w->name);
	else
		snprintf(line, sizeof line, "%s %d %.0f\n", w->name, result, late * 1e6);
	if (write(1, line, strlen(line)) < 0)
		_exit(1);
}

static void *run(void *wait)
{
	pthread_barrier_wait(&ready);
	one(wait);
	return NULL;
}

int main(int count, char **words)
{
	static pthread_t threads[COUNT];
	pthread_attr_t small;
	sigset_t all;
	int n, started = 0;
	pid_t children[COUNT];
	if (count < 2)
		return 2;
	whole = atof(words[1]);
	sigfillset(&all);
	sigdelset(&all, SIGTERM);
	pthread_sigmask(SIG_BLOCK, &all, NULL);
	for (n = 0; n < COUNT; n++) {
		children[n] = 0;
		if (waits[n].forks && !left_out(words + 2, waits[n].name) && !(children[n] = fork())) {
			one(&waits[n]);
			_exit(0);
		}
		started += !waits[n].forks && !left_out(words + 2, waits[n].name);
	}
	owned = gettid();
	pthread_mutex_lock(&taken);
	pthread_barrier_init(&ready, NULL, started + 1);
	pthread_attr_init(&small);
	pthread_attr_setstacksize(&small, 1 << 16);
	for (n = 0; n < COUNT; n++)
		if (!waits[n].forks && !left_out(words + 2, waits[n].name) && pthread_create(&threads[n], &small, run, (void *)&waits[n]))
			return 1;
	if (write(1, "begun\n", 6) != 6)
		return 1;
	pthread_barrier_wait(&ready);
	for (n = 0; n < COUNT; n++) {
		if (threads[n])
			pthread_join(threads[n], NULL);
		if (children[n])
			waitpid(children[n], NULL, 0);
	}
	if (write(1, "over\n", 5) != 5)
		return 1;
	for (;;)
		pause();
}
