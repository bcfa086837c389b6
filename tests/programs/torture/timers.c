/* Timers, and calls with a time-out. Each armed one has a thread that waits for it and notes by how much it missed,
 * by the monotonic and by the real clock. Times are of the program's own clocks: they must go on while it sleeps. */
#include "torture.h"
#include <linux/futex.h>
#include <netinet/in.h>
#include <poll.h>
#include <semaphore.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/time.h>
#include <sys/timerfd.h>

struct timer {
    const struct kind *kind;
    int64_t ms, every_ms;
    int64_t start_mono, start_real;
    int64_t miss_mono_us, miss_real_us; /* late is positive */
    long ticks, expected;
    int64_t phase_us; /* of the last tick after its due time */
    int error;
    bool reported;
    atomic_bool armed, fired;
};

struct kind {
    const char *name;
    int (*wait)(struct timer *); /* arms, marks armed, waits; 0 or errno */
    bool periodic;
};

static struct timer timers[512];
static atomic_int count;

static struct timespec span(int64_t ns) { return (struct timespec){ ns / 1000000000, ns % 1000000000 }; }
static struct timespec rel(struct timer *t) { return span(t->ms * 1000000); }
static struct timespec at(struct timer *t, clockid_t c) {
    return span((c == CLOCK_REALTIME ? t->start_real : t->start_mono) + t->ms * 1000000);
}
static int due(int r) { return r == 0 ? 0 : r < 0 ? errno : EBUSY; } /* EBUSY: returned with an event */

/* timerfd */
static int tfd_wait(struct timer *t, clockid_t clock, bool absolute) {
    int fd = MUST(timerfd_create(clock, TFD_CLOEXEC));
    struct itimerspec s = { .it_value = absolute ? at(t, clock) : rel(t), .it_interval = span(t->every_ms * 1000000) };
    MUST(timerfd_settime(fd, absolute ? TFD_TIMER_ABSTIME : 0, &s, NULL));
    t->armed = true;
    uint64_t n = 0;
    do {
        ssize_t r = read(fd, &n, 8);
        int e = errno;
        if (r != 8) {
            close(fd);
            return e;
        }
        int64_t since = now_ns(CLOCK_MONOTONIC) - t->start_mono - t->ms * 1000000;
        t->ticks += (long)n;
        if (t->every_ms) {
            t->expected = (long)(since / (t->every_ms * 1000000)) + 1;
            t->phase_us = (since - (t->ticks - 1) * t->every_ms * 1000000) / 1000;
        }
    } while (t->every_ms);
    close(fd);
    return n == 1 ? 0 : ERANGE;
}
static int tfd_rel(struct timer *t) { return tfd_wait(t, CLOCK_MONOTONIC, false); }
static int tfd_abs(struct timer *t) { return tfd_wait(t, CLOCK_MONOTONIC, true); }
static int tfd_real(struct timer *t) { return tfd_wait(t, CLOCK_REALTIME, true); }
static int tfd_boot(struct timer *t) { return tfd_wait(t, CLOCK_BOOTTIME, false); }
/* A timer in an epoll set, as event loops have it. */
static int tfd_epoll(struct timer *t) {
    int fd = MUST(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)), ep = MUST(epoll_create1(EPOLL_CLOEXEC));
    struct itimerspec s = { .it_value = rel(t) };
    struct epoll_event e = { .events = EPOLLIN };
    MUST(timerfd_settime(fd, 0, &s, NULL));
    MUST(epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e));
    t->armed = true;
    int r = epoll_wait(ep, &e, 1, -1), err = r == 1 ? 0 : errno;
    close(fd), close(ep);
    return err;
}

/* POSIX and interval timers */
static int posix_wait(struct timer *t, clockid_t clock, bool absolute) {
    timer_t id;
    struct sigevent ev = { .sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIG_FOR_TIMER };
    ev._sigev_un._tid = (int)syscall(SYS_gettid);
    MUST(timer_create(clock, &ev, &id));
    struct itimerspec s = { .it_value = absolute ? at(t, clock) : rel(t), .it_interval = span(t->every_ms * 1000000) };
    MUST(timer_settime(id, absolute ? TIMER_ABSTIME : 0, &s, NULL));
    t->armed = true;
    sigset_t set;
    siginfo_t info;
    sigemptyset(&set), sigaddset(&set, SIG_FOR_TIMER);
    do {
        if (sigwaitinfo(&set, &info) < 0) return errno;
        int64_t since = now_ns(CLOCK_MONOTONIC) - t->start_mono - t->ms * 1000000;
        t->ticks += 1 + (t->every_ms ? timer_getoverrun(id) : 0);
        if (t->every_ms) {
            t->expected = (long)(since / (t->every_ms * 1000000)) + 1;
            t->phase_us = (since - (t->ticks - 1) * t->every_ms * 1000000) / 1000;
        }
    } while (t->every_ms);
    timer_delete(id);
    return 0;
}
static int posix_rel(struct timer *t) { return posix_wait(t, CLOCK_MONOTONIC, false); }
static int posix_abs(struct timer *t) { return posix_wait(t, CLOCK_MONOTONIC, true); }
static int posix_real(struct timer *t) { return posix_wait(t, CLOCK_REALTIME, true); }
static int itimer(struct timer *t) {
    struct itimerval v = { .it_value = { t->ms / 1000, t->ms % 1000 * 1000 },
                           .it_interval = { t->every_ms / 1000, t->every_ms % 1000 * 1000 } };
    MUST(setitimer(ITIMER_REAL, &v, NULL));
    t->armed = true;
    sigset_t set;
    siginfo_t info;
    sigemptyset(&set), sigaddset(&set, SIGALRM);
    do { /* no overrun count: only the phase can be kept */
        if (sigwaitinfo(&set, &info) < 0) return errno;
        int64_t since = now_ns(CLOCK_MONOTONIC) - t->start_mono - t->ms * 1000000;
        t->ticks++;
        if (t->every_ms) t->expected = t->ticks, t->phase_us = since / 1000 % (t->every_ms * 1000);
    } while (t->every_ms);
    return 0;
}

/* sleeps */
static int sleep_rel(struct timer *t) {
    struct timespec s = rel(t);
    t->armed = true;
    return nanosleep(&s, NULL) ? errno : 0;
}
static int sleep_mono(struct timer *t) {
    struct timespec s = rel(t);
    t->armed = true;
    return clock_nanosleep(CLOCK_MONOTONIC, 0, &s, NULL);
}
static int sleep_abs(struct timer *t) {
    struct timespec s = at(t, CLOCK_MONOTONIC);
    t->armed = true;
    return clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &s, NULL);
}
static int sleep_real(struct timer *t) {
    struct timespec s = at(t, CLOCK_REALTIME);
    t->armed = true;
    return clock_nanosleep(CLOCK_REALTIME, TIMER_ABSTIME, &s, NULL);
}

/* waits that time out */
static int wait_poll(struct timer *t) {
    t->armed = true;
    return due(poll(NULL, 0, (int)t->ms));
}
static int wait_ppoll(struct timer *t) {
    struct timespec s = rel(t);
    t->armed = true;
    return due(ppoll(NULL, 0, &s, NULL));
}
static int wait_epoll(struct timer *t) {
    int ep = MUST(epoll_create1(EPOLL_CLOEXEC));
    struct epoll_event e;
    t->armed = true;
    int r = due(epoll_wait(ep, &e, 1, (int)t->ms));
    close(ep);
    return r;
}
static int wait_epoll2(struct timer *t) {
    int ep = MUST(epoll_create1(EPOLL_CLOEXEC));
    struct epoll_event e;
    struct timespec s = rel(t);
    t->armed = true;
    int r = due((int)syscall(SYS_epoll_pwait2, ep, &e, 1, &s, NULL, 0));
    close(ep);
    return r;
}
static int wait_select(struct timer *t) {
    struct timeval v = { t->ms / 1000, t->ms % 1000 * 1000 };
    t->armed = true;
    return due(select(0, NULL, NULL, NULL, &v));
}
static int wait_pselect(struct timer *t) {
    struct timespec s = rel(t);
    t->armed = true;
    return due(pselect(0, NULL, NULL, NULL, &s, NULL));
}
static int timed_out(long r) { return r == -1 && errno == ETIMEDOUT ? 0 : r == -1 ? errno : EBUSY; }
static int wait_futex(struct timer *t) {
    int word = 0;
    struct timespec s = rel(t);
    t->armed = true;
    return timed_out(syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, 0, &s, NULL, 0));
}
static int wait_futex_abs(struct timer *t) {
    int word = 0;
    struct timespec s = at(t, CLOCK_MONOTONIC);
    t->armed = true;
    return timed_out(syscall(SYS_futex, &word, FUTEX_WAIT_BITSET_PRIVATE, 0, &s, NULL, FUTEX_BITSET_MATCH_ANY));
}
static int wait_sem(struct timer *t) {
    sem_t sem;
    sem_init(&sem, 0, 0);
    struct timespec s = at(t, CLOCK_REALTIME);
    t->armed = true;
    return timed_out(sem_timedwait(&sem, &s));
}
static int wait_cond(struct timer *t) {
    pthread_mutex_t m = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t c;
    pthread_condattr_t a;
    pthread_condattr_init(&a);
    pthread_condattr_setclock(&a, CLOCK_MONOTONIC);
    pthread_cond_init(&c, &a);
    struct timespec s = at(t, CLOCK_MONOTONIC);
    pthread_mutex_lock(&m);
    t->armed = true;
    int r = pthread_cond_timedwait(&c, &m, &s);
    pthread_mutex_unlock(&m);
    return r == ETIMEDOUT ? 0 : r ? r : EBUSY;
}
static int wait_signal(struct timer *t) {
    sigset_t set;
    sigemptyset(&set), sigaddset(&set, SIG_FOR_TIMER);
    struct timespec s = rel(t);
    t->armed = true;
    int r = sigtimedwait(&set, NULL, &s);
    return r == -1 && errno == EAGAIN ? 0 : r == -1 ? errno : EBUSY;
}
static int wait_recv(struct timer *t) { /* SO_RCVTIMEO */
    int fd = MUST(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    struct sockaddr_in a = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    struct timeval v = { t->ms / 1000, t->ms % 1000 * 1000 };
    MUST(bind(fd, (void *)&a, sizeof a));
    MUST(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &v, sizeof v));
    char c;
    t->armed = true;
    ssize_t n = recv(fd, &c, 1, 0);
    int e = n == -1 && errno == EAGAIN ? 0 : n == -1 ? errno : EBUSY;
    close(fd);
    return e;
}

static const struct kind kinds[] = {
    { "timerfd", tfd_rel }, { "timerfd_abs", tfd_abs }, { "timerfd_real", tfd_real }, { "timerfd_boot", tfd_boot },
    { "timerfd_epoll", tfd_epoll }, { "posix", posix_rel }, { "posix_abs", posix_abs }, { "posix_real", posix_real },
    { "itimer", itimer }, { "nanosleep", sleep_rel }, { "clock_nanosleep", sleep_mono },
    { "clock_nanosleep_abs", sleep_abs }, { "clock_nanosleep_real", sleep_real }, { "poll", wait_poll },
    { "ppoll", wait_ppoll }, { "epoll_wait", wait_epoll }, { "epoll_pwait2", wait_epoll2 },
    { "select", wait_select }, { "pselect", wait_pselect }, { "futex", wait_futex }, { "futex_abs", wait_futex_abs },
    { "sem_timedwait", wait_sem }, { "cond_timedwait", wait_cond }, { "sigtimedwait", wait_signal },
    { "rcvtimeo", wait_recv }, { "timerfd_periodic", tfd_rel, true }, { "posix_periodic", posix_rel, true },
    { "itimer_periodic", itimer, true },
};

const char *timers_kinds(void) {
    static char text[2048];
    if (!*text)
        for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
            sprintf(text + strlen(text), "%s%s", i ? " " : "", kinds[i].name);
    return text;
}

static void *run(void *arg) {
    struct timer *t = arg;
    t->start_mono = now_ns(CLOCK_MONOTONIC), t->start_real = now_ns(CLOCK_REALTIME);
    t->error = t->kind->wait(t);
    t->miss_mono_us = (now_ns(CLOCK_MONOTONIC) - t->start_mono - t->ms * 1000000) / 1000;
    t->miss_real_us = (now_ns(CLOCK_REALTIME) - t->start_real - t->ms * 1000000) / 1000;
    t->fired = true;
    return NULL;
}

int timers_arm(const char *name, int64_t ms, int64_t every_ms) {
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        if (strcmp(kinds[i].name, name)) continue;
        int id = count++;
        if (id >= (int)(sizeof timers / sizeof *timers)) return -1;
        struct timer *t = &timers[id];
        t->kind = &kinds[i], t->ms = ms, t->every_ms = kinds[i].periodic ? every_ms : 0;
        spawn_thread(run, t);
        while (!t->armed) usleep(200);
        return id;
    }
    return -1;
}

void timers_result(int id, char *out, size_t size) {
    if (id < 0 || id >= count) {
        snprintf(out, size, "error: no timer %d", id);
        return;
    }
    struct timer *t = &timers[id];
    if (t->fired) t->reported = true; /* the client that asks judges it; `check` need not */
    int64_t left = t->ms - (now_ns(CLOCK_MONOTONIC) - t->start_mono) / 1000000;
    snprintf(out, size,
             "kind=%s fired=%d error=%s miss_mono_us=%lld miss_real_us=%lld left_ms=%lld ticks=%ld expected=%ld phase_us=%lld",
             t->kind->name, t->fired, t->error ? strerrorname_np(t->error) : "0", (long long)t->miss_mono_us,
             (long long)t->miss_real_us, (long long)left, t->ticks, t->expected, (long long)t->phase_us);
}

void timers_check(int64_t tolerance_ms) {
    int n = count;
    for (int i = 0; i < n; i++) {
        struct timer *t = &timers[i];
        if (t->reported || t->kind->periodic) continue;
        if (!t->fired) {
            int64_t over = (now_ns(CLOCK_MONOTONIC) - t->start_mono) / 1000000 - t->ms;
            if (over <= tolerance_ms) continue;
            broken("timer %s is overdue by %lld ms", t->kind->name, (long long)over);
            t->reported = true;
            continue;
        }
        t->reported = true;
        /* Socket time-outs are on the kernel's timer wheel: up to an eighth late by design. */
        int64_t slack = tolerance_ms * 1000 + (t->kind->wait == wait_recv ? t->ms * 125 : 0);
        EXPECT(!t->error, "timer %s ended with %s", t->kind->name, strerrorname_np(t->error));
        EXPECT(t->miss_mono_us >= -1000 && t->miss_mono_us <= slack,
               "timer %s of %lld ms missed by %lld us (monotonic)", t->kind->name, (long long)t->ms,
               (long long)t->miss_mono_us);
        EXPECT(t->miss_real_us >= -5000 && t->miss_real_us <= slack + 5000,
               "timer %s of %lld ms missed by %lld us (real)", t->kind->name, (long long)t->ms,
               (long long)t->miss_real_us);
    }
}
