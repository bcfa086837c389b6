/* One thread per kind of blocking call, blocked for ever. A check pokes each and wants exactly one return, with
 * success. A return without a poke, EINTR above all, is what sleeping must not cause. */
#include "torture.h"
#include <linux/futex.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/ipc.h>
#include <sys/msg.h>
#include <sys/prctl.h>
#include <sys/select.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>

struct blocker {
    const char *name;
    void (*setup)(struct blocker *);
    int (*block)(struct blocker *); /* 0 when the awaited thing came, else -1 and errno */
    void (*poke)(struct blocker *);
    int fd[2];
    int aux;
    pid_t pid;
    _Atomic int word;
    atomic_long returns, pokes;
};

static int one_byte(ssize_t n) {
    if (n > 0) return 0;
    if (n == 0) errno = ENODATA;
    return -1;
}

/* pipe and its waiters */
static void pipe_setup(struct blocker *b) { MUST(pipe2(b->fd, O_CLOEXEC)); }
static void pipe_poke(struct blocker *b) { MUST(write(b->fd[1], "x", 1)); }
static int drain(int fd) { char c[64]; return one_byte(read(fd, c, sizeof c)); }
static int read_block(struct blocker *b) { return drain(b->fd[0]); }
static int poll_block(struct blocker *b) {
    struct pollfd p = { .fd = b->fd[0], .events = POLLIN };
    int n = poll(&p, 1, -1);
    return n == 1 ? drain(b->fd[0]) : -1;
}
static int select_block(struct blocker *b) {
    fd_set s;
    FD_ZERO(&s);
    FD_SET(b->fd[0], &s);
    int n = select(b->fd[0] + 1, &s, NULL, NULL, NULL);
    return n == 1 ? drain(b->fd[0]) : -1;
}
static void epoll_setup(struct blocker *b) {
    pipe_setup(b);
    int inner = MUST(epoll_create1(EPOLL_CLOEXEC));
    b->aux = MUST(epoll_create1(EPOLL_CLOEXEC));
    struct epoll_event e = { .events = EPOLLIN | EPOLLET, .data.u64 = 0xABCDEF0123456789u };
    MUST(epoll_ctl(inner, EPOLL_CTL_ADD, b->fd[0], &e));
    e.events = EPOLLIN;
    MUST(epoll_ctl(b->aux, EPOLL_CTL_ADD, inner, &e)); /* nested: the outer one sees the inner one readable */
    b->pid = inner;
}
static int epoll_block(struct blocker *b) {
    struct epoll_event e;
    int n = epoll_wait(b->aux, &e, 1, -1);
    if (n != 1) return -1;
    if (e.data.u64 != 0xABCDEF0123456789u) broken("epoll data changed");
    n = epoll_wait(b->pid, &e, 1, 0);
    if (n != 1) broken("nested epoll is not ready (%d)", n);
    return drain(b->fd[0]);
}
/* A writer blocked on a full pipe. */
static void write_setup(struct blocker *b) {
    pipe_setup(b);
    MUST(fcntl(b->fd[1], F_SETPIPE_SZ, 4096));
    char page[4096];
    memset(page, 'w', sizeof page);
    MUST(write(b->fd[1], page, sizeof page));
}
static int write_block(struct blocker *b) {
    char page[4096];
    memset(page, 'w', sizeof page);
    ssize_t n = write(b->fd[1], page, sizeof page);
    if (n >= 0 && n != sizeof page) broken("short write to a pipe: %zd", n);
    return n < 0 ? -1 : 0;
}
static void write_poke(struct blocker *b) {
    char page[4096];
    for (size_t got = 0; got < sizeof page;) got += (size_t)MUST(read(b->fd[0], page + got, sizeof page - got));
    for (size_t i = 0; i < sizeof page; i++)
        if (page[i] != 'w') { broken("bytes in a full pipe changed"); break; }
}

/* futex, eventfd, signals, inotify */
static int futex_block(struct blocker *b) {
    long r = syscall(SYS_futex, &b->word, FUTEX_WAIT_PRIVATE, 0, NULL, NULL, 0);
    if (r == -1 && errno != EAGAIN) return -1;
    if (b->word == 0) { errno = EINTR; return -1; } /* woken without reason */
    b->word = 0;
    return 0;
}
static void futex_poke(struct blocker *b) {
    b->word = 1;
    syscall(SYS_futex, &b->word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}
static void eventfd_setup(struct blocker *b) { b->fd[0] = MUST(eventfd(0, EFD_CLOEXEC)); }
static void eventfd_poke(struct blocker *b) { uint64_t v = 3; MUST(write(b->fd[0], &v, 8)); }
static int eventfd_block(struct blocker *b) {
    uint64_t v = 0;
    if (read(b->fd[0], &v, 8) != 8) return -1;
    if (v != 3) broken("eventfd counted %llu, not 3", (unsigned long long)v);
    return 0;
}
static void signalfd_setup(struct blocker *b) {
    sigset_t s;
    sigemptyset(&s), sigaddset(&s, SIG_FOR_SIGNALFD);
    b->fd[0] = MUST(signalfd(-1, &s, SFD_CLOEXEC));
}
static void signalfd_poke(struct blocker *b) { (void)b; kill(getpid(), SIG_FOR_SIGNALFD); }
static int signalfd_block(struct blocker *b) {
    struct signalfd_siginfo i;
    return read(b->fd[0], &i, sizeof i) == sizeof i ? 0 : -1;
}
static int sigwait_block(struct blocker *b) {
    (void)b;
    sigset_t s;
    siginfo_t i;
    sigemptyset(&s), sigaddset(&s, SIG_FOR_SIGWAIT);
    if (sigwaitinfo(&s, &i) < 0) return -1;
    if (i.si_value.sival_int != 77) broken("signal's value is %d, not 77", i.si_value.sival_int);
    return 0;
}
static void sigwait_poke(struct blocker *b) {
    (void)b;
    sigqueue(getpid(), SIG_FOR_SIGWAIT, (union sigval){ .sival_int = 77 });
}
static void inotify_setup(struct blocker *b) {
    mkdir(DIR_PATH "/watched", 0755);
    b->fd[0] = MUST(inotify_init1(IN_CLOEXEC));
    MUST(inotify_add_watch(b->fd[0], DIR_PATH "/watched", IN_CREATE));
}
static void inotify_poke(struct blocker *b) {
    (void)b;
    MUST(mkdir(DIR_PATH "/watched/d", 0755));
    MUST(rmdir(DIR_PATH "/watched/d"));
}
static int inotify_block(struct blocker *b) {
    char buf[4096];
    ssize_t n = read(b->fd[0], buf, sizeof buf);
    if (n < (ssize_t)sizeof(struct inotify_event)) return -1;
    struct inotify_event *e = (void *)buf;
    if (!(e->mask & IN_CREATE) || strcmp(e->name, "d")) broken("inotify reported mask %x", e->mask);
    return 0;
}

/* sockets */
static void unix_listen_setup(struct blocker *b) {
    struct sockaddr_un a = { .sun_family = AF_UNIX, .sun_path = DIR_PATH "/stream.sock" };
    b->fd[0] = MUST(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    unlink(a.sun_path);
    MUST(bind(b->fd[0], (void *)&a, sizeof a));
    MUST(listen(b->fd[0], 5));
}
static void unix_listen_poke(struct blocker *b) {
    struct sockaddr_un a = { .sun_family = AF_UNIX, .sun_path = DIR_PATH "/stream.sock" };
    (void)b;
    int fd = MUST(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (connect(fd, (void *)&a, sizeof a)) broken("connect to a unix socket: %s", strerror(errno));
    close(fd);
}
static int accept_block(struct blocker *b) {
    int fd = accept4(b->fd[0], NULL, NULL, SOCK_CLOEXEC);
    if (fd < 0) return -1;
    close(fd);
    return 0;
}
static void abstract_setup(struct blocker *b) { /* a datagram socket with an abstract name */
    struct sockaddr_un a = { .sun_family = AF_UNIX, .sun_path = "\0torture-dgram" };
    b->fd[0] = MUST(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    MUST(bind(b->fd[0], (void *)&a, offsetof(struct sockaddr_un, sun_path) + 14));
    b->fd[1] = MUST(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    MUST(connect(b->fd[1], (void *)&a, offsetof(struct sockaddr_un, sun_path) + 14));
}
static int recv_block(struct blocker *b) {
    char c[8];
    return one_byte(recv(b->fd[0], c, sizeof c, 0));
}
static void send_poke(struct blocker *b) {
    if (send(b->fd[1], "x", 1, MSG_NOSIGNAL) != 1) broken("%s: send: %s", b->name, strerror(errno));
}
static void seqpacket_setup(struct blocker *b) { MUST(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, b->fd)); }
static int loopback(int type, struct sockaddr_in *a) {
    socklen_t n = sizeof *a;
    int fd = MUST(socket(AF_INET, type | SOCK_CLOEXEC, 0));
    *a = (struct sockaddr_in){ .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    MUST(bind(fd, (void *)a, sizeof *a));
    if (type == SOCK_STREAM) MUST(listen(fd, 3));
    MUST(getsockname(fd, (void *)a, &n));
    return fd;
}
static void tcp_listen_setup(struct blocker *b) {
    struct sockaddr_in a;
    b->fd[0] = loopback(SOCK_STREAM, &a);
    b->aux = a.sin_port;
}
static void tcp_listen_poke(struct blocker *b) {
    struct sockaddr_in a = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                             .sin_port = (in_port_t)b->aux };
    int fd = MUST(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (connect(fd, (void *)&a, sizeof a)) broken("connect to own loopback listener: %s", strerror(errno));
    close(fd);
}
static void tcp_setup(struct blocker *b) { /* an established connection of the program with itself */
    struct sockaddr_in a;
    int l = loopback(SOCK_STREAM, &a);
    b->fd[1] = MUST(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    MUST(connect(b->fd[1], (void *)&a, sizeof a));
    b->fd[0] = MUST(accept4(l, NULL, NULL, SOCK_CLOEXEC));
    close(l);
}
static void udp_setup(struct blocker *b) {
    struct sockaddr_in a;
    b->fd[0] = loopback(SOCK_DGRAM, &a);
    b->fd[1] = MUST(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    MUST(connect(b->fd[1], (void *)&a, sizeof a));
}

/* fifo, locks, System V messages, children */
static void fifo_setup(struct blocker *b) {
    unlink(DIR_PATH "/fifo");
    MUST(mkfifo(DIR_PATH "/fifo", 0600));
    b->fd[0] = b->fd[1] = MUST(open(DIR_PATH "/fifo", O_RDWR | O_CLOEXEC));
}
static void flock_setup(struct blocker *b) {
    for (int i = 0; i < 2; i++) b->fd[i] = MUST(open(DIR_PATH "/flock", O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    MUST(flock(b->fd[1], LOCK_EX));
}
static int flock_block(struct blocker *b) {
    while (b->word) usleep(1000); /* until the poker holds it again */
    if (flock(b->fd[0], LOCK_EX)) return -1;
    b->word = 1;
    flock(b->fd[0], LOCK_UN);
    return 0;
}
static void flock_poke(struct blocker *b) { flock(b->fd[1], LOCK_UN); }
static void msg_setup(struct blocker *b) { b->aux = MUST(msgget(IPC_PRIVATE, 0600)); }
static void msg_poke(struct blocker *b) {
    struct { long type; char text[4]; } m = { 1, "hey" };
    if (msgsnd(b->aux, &m, 4, 0)) broken("msgsnd: %s", strerror(errno));
}
static int msg_block(struct blocker *b) {
    struct { long type; char text[4]; } m;
    return msgrcv(b->aux, &m, 4, 0, 0) == 4 ? 0 : -1;
}
static void wait_fork(struct blocker *b) {
    pid_t p = MUST(fork());
    if (p == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        char c;
        ssize_t n = read(b->fd[0], &c, 1);
        _exit(n == 1 ? 42 : 43);
    }
    b->pid = p;
}
static void wait_setup(struct blocker *b) { pipe_setup(b), wait_fork(b); }
static int wait_block(struct blocker *b) {
    int status;
    pid_t p = waitpid(b->pid, &status, 0);
    if (p < 0) return -1;
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 42) broken("child's wait status is %x", (unsigned)status);
    wait_fork(b);
    return 0;
}

#define PIPE(n, f) { .name = n, .setup = pipe_setup, .block = f, .poke = pipe_poke }
static struct blocker blockers[] = {
    PIPE("read pipe", read_block), PIPE("poll", poll_block), PIPE("select", select_block),
    { "epoll_wait", epoll_setup, epoll_block, pipe_poke },
    { "write pipe", write_setup, write_block, write_poke },
    { "futex", NULL, futex_block, futex_poke },
    { "eventfd", eventfd_setup, eventfd_block, eventfd_poke },
    { "signalfd", signalfd_setup, signalfd_block, signalfd_poke },
    { "sigwaitinfo", NULL, sigwait_block, sigwait_poke },
    { "inotify", inotify_setup, inotify_block, inotify_poke },
    { "accept unix", unix_listen_setup, accept_block, unix_listen_poke },
    { "recv unix dgram", abstract_setup, recv_block, send_poke },
    { "recv unix seqpacket", seqpacket_setup, recv_block, send_poke },
    { "accept tcp", tcp_listen_setup, accept_block, tcp_listen_poke },
    { "recv tcp", tcp_setup, recv_block, send_poke },
    { "recv udp", udp_setup, recv_block, send_poke },
    { "read fifo", fifo_setup, read_block, pipe_poke },
    { "flock", flock_setup, flock_block, flock_poke },
    { "msgrcv", msg_setup, msg_block, msg_poke },
    { "waitpid", wait_setup, wait_block, pipe_poke },
};
enum { COUNT = sizeof blockers / sizeof *blockers };

static void *run(void *arg) {
    struct blocker *b = arg;
    for (;;) {
        errno = 0;
        if (b->block(b)) {
            broken("%s returned %s", b->name, strerror(errno));
            usleep(10000); /* a call that fails at once must not fill the list */
            continue;
        }
        b->returns++;
    }
    return NULL;
}

int blockers_count(void) { return COUNT; }

void blockers_start(void) {
    for (int i = 0; i < COUNT; i++) {
        if (skipped(blockers[i].name)) {
            blockers[i].poke = NULL;
            continue;
        }
        if (blockers[i].setup) blockers[i].setup(&blockers[i]);
        spawn_thread(run, &blockers[i]);
    }
}

void blockers_check(void) {
    for (int i = 0; i < COUNT; i++) {
        struct blocker *b = &blockers[i];
        if (!b->poke) continue;
        EXPECT(b->returns == b->pokes, "%s returned %ld times for %ld pokes", b->name, (long)b->returns, (long)b->pokes);
        b->pokes = b->returns + 1;
        b->poke(b);
    }
    for (int i = 0; i < COUNT; i++) {
        struct blocker *b = &blockers[i];
        if (!b->poke) continue;
        for (int t = 0; t < patience_ms && b->returns < b->pokes; t++) usleep(1000);
        EXPECT(b->returns == b->pokes, "%s did not return when poked", b->name);
        if (!strcmp(b->name, "flock") && b->returns == b->pokes) {
            MUST(flock(b->fd[1], LOCK_EX));
            b->word = 0;
        }
    }
}
