/* What a process holds without waiting on it: memory of every kind, open files, locks, bytes in flight, a pending
 * signal, credentials and settings. Each is looked at by every check; what is consumed by looking is put back. */
#include "torture.h"
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/shm.h>
#include <sys/stat.h>

#define MEM (4u << 20)

static struct area {
    const char *name;
    void *p;
    size_t n;
} areas[300];
static int area_count;
static pid_t pid, tid, sid;
static int deleted, memfd, appender, offset_fd, posix_fd, bsd_fd, ofd_fd, counter, pipe_fd[2], dgram[2], tcp[2], passing[2];
static _Thread_local uint64_t tls_word = 0xFEEDFACE;
static long appended;

static void remember(const char *name, void *p, size_t n) {
    if (p == MAP_FAILED) die(name);
    fill(p, n, (uint64_t)area_count + 1);
    areas[area_count++] = (struct area){ name, p, n };
}

static void memory_start(void) {
    int rw = PROT_READ | PROT_WRITE;
    remember("private anonymous memory", mmap(NULL, MEM, rw, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), MEM);
    remember("shared anonymous memory", mmap(NULL, 1 << 20, rw, MAP_SHARED | MAP_ANONYMOUS, -1, 0), 1 << 20);
    void *low = mmap(NULL, 1 << 20, rw, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    remember("memory that is read-only now", low, 1 << 20);
    MUST(mprotect(low, 1 << 20, PROT_READ));
    remember("malloc'ed memory", malloc(200000), 200000);
    remember("the heap", sbrk(300000), 300000);
    memfd = MUST(memfd_create("torture", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    MUST(ftruncate(memfd, 1 << 20));
    remember("memfd", mmap(NULL, 1 << 20, rw, MAP_SHARED, memfd, 0), 1 << 20);
    MUST(fcntl(memfd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW));
    /* A native restore opens a file of a process for one descriptor, not for two that share it. */
    if (!skipped("proc"))
        MUST(fcntl(MUST(open("/proc/self/statm", O_RDONLY | O_CLOEXEC)), F_DUPFD_CLOEXEC, 0));
    int fd = MUST(open("/dev/shm/torture", O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
    MUST(ftruncate(fd, 1 << 20));
    remember("/dev/shm mapping", mmap(NULL, 1 << 20, rw, MAP_SHARED, fd, 0), 1 << 20);
    close(fd);
    fd = MUST(open(DIR_PATH "/private-map", O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
    MUST(ftruncate(fd, 1 << 20));
    remember("private file mapping", mmap(NULL, 1 << 20, rw, MAP_PRIVATE, fd, 0), 1 << 20);
    close(fd);
    int id = skipped("shm") ? -1 : shmget(IPC_PRIVATE, 1 << 16, 0600);
    if (id >= 0) {
        void *p = shmat(id, NULL, 0);
        shmctl(id, IPC_RMID, NULL);
        remember("System V shared memory", p, 1 << 16);
    }
    /* Sparse: most pages are never touched. */
    char *sparse = mmap(NULL, 64 << 20, rw, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (sparse == MAP_FAILED) die("sparse");
    for (int i = 0; i < 4; i++) remember("a page of a sparse mapping", sparse + (i * 15 << 20), 4096);
}

static void files_start(void) {
    deleted = MUST(open(DIR_PATH "/deleted", O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
    char page[4096];
    fill(page, sizeof page, 501);
    MUST(write(deleted, page, sizeof page));
    if (!skipped("deleted")) MUST(unlink(DIR_PATH "/deleted"));
    appender = MUST(open(DIR_PATH "/appended", O_WRONLY | O_APPEND | O_CREAT | O_TRUNC | O_CLOEXEC, 0640));
    offset_fd = MUST(open(DIR_PATH "/offset", O_RDWR | O_CREAT | O_TRUNC | O_NONBLOCK, 0604));
    MUST(write(offset_fd, page, 1000));
    MUST(lseek(offset_fd, 123, SEEK_SET));
    struct flock l = { .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 5, .l_len = 20 };
    posix_fd = MUST(open(DIR_PATH "/posix-lock", O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    MUST(fcntl(posix_fd, F_SETLK, &l));
    bsd_fd = MUST(open(DIR_PATH "/bsd-lock", O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    MUST(flock(bsd_fd, LOCK_EX));
    ofd_fd = MUST(open(DIR_PATH "/ofd-lock", O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    MUST(fcntl(ofd_fd, F_OFD_SETLK, &l));
    counter = MUST(eventfd(12345, EFD_CLOEXEC | EFD_NONBLOCK));
}

/* Bytes that are on their way while it sleeps. */
static void in_flight(void) {
    char buf[3000];
    fill(buf, sizeof buf, 601);
    EXPECT(write(pipe_fd[1], buf, sizeof buf) == (ssize_t)sizeof buf, "pipe: %s", strerror(errno));
    EXPECT(send(dgram[1], buf, 700, 0) == 700, "dgram: %s", strerror(errno));
    EXPECT(send(dgram[1], buf, 9, 0) == 9, "dgram: %s", strerror(errno));
    EXPECT(send(tcp[1], buf, sizeof buf, MSG_NOSIGNAL) == (ssize_t)sizeof buf, "tcp: %s", strerror(errno));
    EXPECT(send(passing[1], buf, 100, 0) == 100, "unix stream: %s", strerror(errno));
    union sigval v = { .sival_int = 4242 };
    EXPECT(!sigqueue(getpid(), SIG_KEPT_PENDING, v), "sigqueue: %s", strerror(errno));
}

static void check_bytes(const char *what, ssize_t got, size_t want, const void *buf) {
    if (got != (ssize_t)want) broken("%s: %zd bytes came out, not %zu (%s)", what, got, want, strerror(errno));
    else EXPECT(same(buf, want, 601), "%s: bytes in flight changed", what);
}

static void in_flight_check(void) {
    char buf[4096];
    check_bytes("pipe", read(pipe_fd[0], buf, sizeof buf), 3000, buf);
    check_bytes("unix dgram", recv(dgram[0], buf, sizeof buf, MSG_DONTWAIT), 700, buf);
    check_bytes("second unix dgram", recv(dgram[0], buf, sizeof buf, MSG_DONTWAIT), 9, buf);
    size_t have = 0;
    for (ssize_t n; have < 3000 && (n = recv(tcp[0], buf + have, 3000 - have, 0)) > 0;) have += (size_t)n;
    check_bytes("tcp", (ssize_t)have, 3000, buf);
    check_bytes("unix stream", recv(passing[0], buf, sizeof buf, MSG_DONTWAIT), 100, buf);
    sigset_t s;
    siginfo_t i = { 0 };
    sigemptyset(&s), sigaddset(&s, SIG_KEPT_PENDING);
    struct timespec none = { 0, 0 };
    int r = sigtimedwait(&s, &i, &none);
    EXPECT(r == SIG_KEPT_PENDING && i.si_value.sival_int == 4242, "the pending signal is gone or changed (%d)", r);
    in_flight();
}

static void on_signal(int s) { (void)s; }

static void settings_start(void) {
    umask(027);
    MUST(chdir(DIR_PATH));
    struct rlimit l = { 777, 888 };
    MUST(setrlimit(RLIMIT_NOFILE, &l));
    struct sigaction a = { .sa_handler = on_signal, .sa_flags = SA_RESTART };
    sigaddset(&a.sa_mask, SIGTERM);
    MUST(sigaction(SIGHUP, &a, NULL));
    stack_t st = { .ss_sp = malloc(65536), .ss_size = 65536 };
    MUST(sigaltstack(&st, NULL));
    pid = getpid(), tid = (pid_t)syscall(SYS_gettid), sid = getsid(0);
    (void)setpriority(PRIO_PROCESS, 0, 3);
}

static void settings_check(void) {
    char cwd[256], name[32] = "";
    mode_t m = umask(0);
    umask(m);
    EXPECT(m == 027, "umask is %o", m);
    EXPECT(getcwd(cwd, sizeof cwd) && !strcmp(cwd, DIR_PATH), "working directory changed");
    struct rlimit l = { 0 };
    getrlimit(RLIMIT_NOFILE, &l);
    EXPECT(l.rlim_cur == 777 && l.rlim_max == 888, "limit of open files is %ld", (long)l.rlim_cur);
    struct sigaction a;
    sigaction(SIGHUP, NULL, &a);
    EXPECT(a.sa_handler == on_signal && (a.sa_flags & SA_RESTART) && sigismember(&a.sa_mask, SIGTERM), "sigaction changed");
    sigaction(SIGPIPE, NULL, &a);
    EXPECT(a.sa_handler == SIG_IGN, "SIGPIPE is not ignored any more");
    EXPECT(getpid() == pid && getsid(0) == sid, "pid or session changed");
    EXPECT(syscall(SYS_tgkill, pid, tid, 0) == 0, "thread id changed");
    EXPECT(prctl(PR_GET_NAME, name) == 0 && *name, "thread has no name");
    EXPECT(tls_word == 0xFEEDFACE, "thread-local memory changed");
    errno = 0;
    EXPECT(getpriority(PRIO_PROCESS, (id_t)pid) == 3, "nice value changed");
    EXPECT(getuid() == 0 && getgid() == 0, "ids changed: %d", getuid());
}

static void files_check(void) {
    char page[4096];
    struct stat s;
    EXPECT(pread(deleted, page, sizeof page, 0) == (ssize_t)sizeof page && same(page, sizeof page, 501),
           "the deleted file's bytes changed");
    EXPECT(!fstat(deleted, &s) && s.st_nlink == skipped("deleted"), "the deleted file has a name again");
    EXPECT(!fstat(memfd, &s) && s.st_size == 1 << 20, "memfd has another size");
    EXPECT(fcntl(memfd, F_GET_SEALS) == (F_SEAL_SHRINK | F_SEAL_GROW), "seals of the memfd changed");
    EXPECT(write(appender, "line\n", 5) == 5 && !fstat(appender, &s) && s.st_size == ++appended * 5,
           "appended file has %ld bytes", (long)s.st_size);
    EXPECT(lseek(offset_fd, 0, SEEK_CUR) == 123, "file offset changed");
    EXPECT(fcntl(offset_fd, F_GETFL) & O_NONBLOCK, "O_NONBLOCK is lost");
    EXPECT(!(fcntl(offset_fd, F_GETFD) & FD_CLOEXEC) && (fcntl(deleted, F_GETFD) & FD_CLOEXEC), "close-on-exec changed");
    uint64_t v = 0;
    EXPECT(read(counter, &v, 8) == 8 && v == 12345, "eventfd's count is %llu", (unsigned long long)v);
    v = 12345;
    EXPECT(write(counter, &v, 8) == 8, "eventfd: %s", strerror(errno));
    int on = 0;
    socklen_t n = sizeof on;
    EXPECT(!getsockopt(tcp[0], IPPROTO_TCP, TCP_NODELAY, &on, &n) && on, "TCP_NODELAY is lost");
    EXPECT(!getsockopt(tcp[0], SOL_SOCKET, SO_KEEPALIVE, &on, &n) && on, "SO_KEEPALIVE is lost");
    EXPECT(!getsockopt(tcp[0], IPPROTO_TCP, TCP_KEEPIDLE, &on, &n) && on == 321, "TCP_KEEPIDLE is %d", on);
    EXPECT(!getsockopt(tcp[0], SOL_SOCKET, SO_RCVBUF, &on, &n) && on == 2 * 70000, "SO_RCVBUF is %d", on);
}

static void sockets_start(void) {
    int one = 1, idle = 321, buf = 70000, l = MUST(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    struct sockaddr_in a = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t n = sizeof a;
    MUST(bind(l, (void *)&a, sizeof a)), MUST(listen(l, 1)), MUST(getsockname(l, (void *)&a, &n));
    tcp[1] = MUST(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    MUST(connect(tcp[1], (void *)&a, sizeof a));
    tcp[0] = MUST(accept4(l, NULL, NULL, SOCK_CLOEXEC));
    close(l);
    MUST(setsockopt(tcp[0], IPPROTO_TCP, TCP_NODELAY, &one, sizeof one));
    MUST(setsockopt(tcp[0], SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one));
    MUST(setsockopt(tcp[0], IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle));
    MUST(setsockopt(tcp[0], SOL_SOCKET, SO_RCVBUF, &buf, sizeof buf));
    MUST(pipe2(pipe_fd, O_CLOEXEC));
    MUST(socketpair(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0, dgram));
    MUST(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, passing));
}

void things_start(void) {
    mkdir(DIR_PATH, 0755);
    memory_start();
    files_start();
    sockets_start();
    settings_start();
    in_flight();
}

void things_eat(size_t mib) {
    for (; mib && area_count < 300; mib--)
        remember("eaten memory", mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), 1 << 20);
}

void things_check(void) {
    for (int i = 0; i < area_count; i++)
        EXPECT(same(areas[i].p, areas[i].n, (uint64_t)i + 1), "%s changed", areas[i].name);
    files_check();
    in_flight_check();
    settings_check();
}
