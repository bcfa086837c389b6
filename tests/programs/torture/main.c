/* Entry and line protocol on a TCP port (IPv6 socket that takes IPv4 as well), with a UDP echo on the same number.
 *
 *   check TOLERANCE_MS       verifies everything: `ok N` or `broken: what; what`
 *   arm KIND MS [EVERY_MS]   `armed ID`; KIND from `kinds`
 *   result ID                one line of key=value
 *   clocks                   realtime, monotonic, boottime in ns
 *   stats                    key=value
 *   echo TEXT | say TEXT (prints on stdout) | complain TEXT (on stderr) | eat MIB | rebind | bye | exit CODE
 */
#include "torture.h"
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdarg.h>
#include <sys/prctl.h>

enum { PATIENCE_MS = 2000 };
long patience_ms = PATIENCE_MS;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char faults[65536];
static size_t faults_len;
static atomic_long checks, commands, connections, rebinds;
static int rebind_error;
static int port, listener = -1;
static int64_t started_mono, started_real;

void broken(const char *fmt, ...) {
    va_list ap;
    pthread_mutex_lock(&lock);
    size_t left = sizeof faults - faults_len;
    if (left > 300) {
        if (faults_len) faults_len += (size_t)snprintf(faults + faults_len, left, "; ");
        va_start(ap, fmt);
        int n = vsnprintf(faults + faults_len, 256, fmt, ap);
        va_end(ap);
        faults_len += (size_t)(n > 255 ? 255 : n);
    }
    pthread_mutex_unlock(&lock);
}

void die(const char *what) {
    dprintf(2, "torture: %s: %s\n", what, strerror(errno));
    _exit(70);
}

bool skipped(const char *word) {
    const char *list = getenv("TORTURE_SKIP");
    size_t n = strlen(word);
    for (const char *at = list; at && (at = strstr(at, word)); at += n)
        if ((at == list || at[-1] == ',') && (!at[n] || at[n] == ',')) return true;
    return false;
}

int64_t now_ns(clockid_t clock) {
    struct timespec t;
    MUST(clock_gettime(clock, &t));
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static uint64_t next_word(uint64_t *x) {
    *x ^= *x << 13, *x ^= *x >> 7, *x ^= *x << 17;
    return *x;
}

void fill(void *p, size_t n, uint64_t seed) {
    uint64_t x = seed * 0x9E3779B97F4A7C15u + 1;
    for (size_t i = 0; i + 8 <= n; i += 8) {
        uint64_t w = next_word(&x);
        memcpy((char *)p + i, &w, 8);
    }
}

bool same(const void *p, size_t n, uint64_t seed) {
    uint64_t x = seed * 0x9E3779B97F4A7C15u + 1;
    for (size_t i = 0; i + 8 <= n; i += 8) {
        uint64_t w = next_word(&x);
        if (memcmp((const char *)p + i, &w, 8)) return false;
    }
    return true;
}

void spawn_thread(void *(*run)(void *), void *arg) {
    pthread_t t;
    pthread_attr_t a;
    pthread_attr_init(&a);
    pthread_attr_setdetachstate(&a, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&a, 256 * 1024);
    if ((errno = pthread_create(&t, &a, run, arg))) die("pthread_create");
    pthread_attr_destroy(&a);
}

static int open_listener(void) {
    int one = 1, zero = 0;
    int fd = MUST(socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
    MUST(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one));
    MUST(setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &zero, sizeof zero));
    struct sockaddr_in6 a = { .sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port) };
    if (bind(fd, (void *)&a, sizeof a) || listen(fd, 37)) {
        int e = errno;
        close(fd);
        errno = e;
        return -1;
    }
    return fd;
}

/* What getsockopt says about the listener must not change by sleeping. */
static void check_listener(void) {
    int v = 0;
    socklen_t n = sizeof v;
    struct tcp_info info;
    socklen_t in = sizeof info;
    EXPECT(!getsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &v, &n) && v == 1, "listener lost SO_REUSEADDR (%d)", v);
    EXPECT(!getsockopt(listener, SOL_SOCKET, SO_ACCEPTCONN, &v, &n) && v == 1, "listener does not listen");
    if (getsockopt(listener, IPPROTO_TCP, TCP_INFO, &info, &in))
        broken("TCP_INFO of the listener: %s", strerror(errno));
    else
        EXPECT(info.tcpi_sacked == 37, "listener's backlog is %u, not 37", info.tcpi_sacked);
}

/* Closes the listener and binds the port anew while connections to it are open: works only if every one of them
 * still has SO_REUSEADDR. */
static const char *rebind(void) {
    long before = rebinds;
    /* Never close a descriptor that another thread is in accept() on: shut down, accept returns, then bind. */
    shutdown(listener, SHUT_RDWR);
    for (int i = 0; i < patience_ms && rebinds == before; i++) usleep(1000);
    return rebinds == before ? "stuck" : listener < 0 ? strerror(rebind_error) : "rebound";
}

static bool command(int fd, char *line, FILE *out) {
    char word[32] = "", rest[4096] = "";
    long a = 0, b = 0;
    char kind[64];
    commands++;
    sscanf(line, "%31s %4095[^\n]", word, rest);
    if (!strcmp(word, "check")) {
        checks++;
        patience_ms = atol(rest) > PATIENCE_MS ? atol(rest) : PATIENCE_MS;
        things_check();
        check_listener();
        children_check();
        blockers_check();
        timers_check(atol(rest));
        pthread_mutex_lock(&lock);
        if (faults_len) fprintf(out, "broken: %s\n", faults);
        else fprintf(out, "ok %ld\n", (long)checks);
        faults_len = 0;
        pthread_mutex_unlock(&lock);
    } else if (!strcmp(word, "arm") && sscanf(rest, "%63s %ld %ld", kind, &a, &b) >= 2) {
        int id = timers_arm(kind, a, b);
        if (id < 0) fprintf(out, "error: no kind %s\n", kind);
        else fprintf(out, "armed %d\n", id);
    } else if (!strcmp(word, "result")) {
        char text[512];
        timers_result(atoi(rest), text, sizeof text);
        fprintf(out, "%s\n", text);
    } else if (!strcmp(word, "kinds")) {
        fprintf(out, "%s\n", timers_kinds());
    } else if (!strcmp(word, "clocks")) {
        fprintf(out, "realtime=%lld monotonic=%lld boottime=%lld raw=%lld started_mono=%lld started_real=%lld\n",
                (long long)now_ns(CLOCK_REALTIME), (long long)now_ns(CLOCK_MONOTONIC),
                (long long)now_ns(CLOCK_BOOTTIME), (long long)now_ns(CLOCK_MONOTONIC_RAW), (long long)started_mono,
                (long long)started_real);
    } else if (!strcmp(word, "stats")) {
        fprintf(out, "checks=%ld commands=%ld connections=%ld blockers=%d pid=%d child=%d counter=%ld\n", (long)checks,
                (long)commands, (long)connections, blockers_count(), getpid(), child_pid(), (long)*shared_counter);
    } else if (!strcmp(word, "echo")) {
        fprintf(out, "%s\n", rest);
    } else if (!strcmp(word, "say")) {
        dprintf(1, "%s\n", rest);
        fprintf(out, "said\n");
    } else if (!strcmp(word, "complain")) {
        dprintf(2, "%s\n", rest);
        fprintf(out, "said\n");
    } else if (!strcmp(word, "eat")) {
        things_eat((size_t)atol(rest));
        fprintf(out, "eaten\n");
    } else if (!strcmp(word, "rebind")) {
        fprintf(out, "%s\n", rebind());
    } else if (!strcmp(word, "exit")) {
        _exit(atoi(rest));
    } else if (!strcmp(word, "bye")) {
        return false;
    } else {
        fprintf(out, "error: unknown command\n");
    }
    fflush(out);
    (void)fd;
    return true;
}

static void *serve(void *arg) {
    int fd = (int)(intptr_t)arg;
    FILE *out = fdopen(dup(fd), "w");
    char buf[8192];
    size_t have = 0;
    for (;;) {
        ssize_t n = read(fd, buf + have, sizeof buf - 1 - have);
        if (n < 0) broken("read on a connection: %s", strerror(errno));
        if (n <= 0) break;
        have += (size_t)n;
        buf[have] = 0;
        char *eol, *line = buf;
        bool go = true;
        while (go && (eol = memchr(line, '\n', have - (size_t)(line - buf)))) {
            *eol = 0;
            go = command(fd, line, out);
            line = eol + 1;
        }
        if (!go) break;
        have -= (size_t)(line - buf);
        memmove(buf, line, have);
        if (have == sizeof buf - 1) break;
    }
    fclose(out);
    close(fd);
    return NULL;
}

static void *udp_echo(void *arg) {
    int fd = (int)(intptr_t)arg;
    char buf[2048];
    for (;;) {
        struct sockaddr_in6 from;
        socklen_t len = sizeof from;
        ssize_t n = recvfrom(fd, buf, sizeof buf, 0, (void *)&from, &len);
        if (n < 0) {
            broken("recvfrom: %s", strerror(errno));
            continue;
        }
        sendto(fd, buf, (size_t)n, 0, (void *)&from, len);
    }
    return NULL;
}

int main(int argc, char **argv) {
    port = argc > 1 ? atoi(argv[1]) : 7000;
    started_mono = now_ns(CLOCK_MONOTONIC), started_real = now_ns(CLOCK_REALTIME);
    sigset_t all;
    sigemptyset(&all);
    sigaddset(&all, SIG_FOR_SIGNALFD), sigaddset(&all, SIG_FOR_SIGWAIT), sigaddset(&all, SIGALRM);
    sigaddset(&all, SIG_FOR_TIMER), sigaddset(&all, SIG_KEPT_PENDING);
    MUST(sigprocmask(SIG_BLOCK, &all, NULL));
    signal(SIGPIPE, SIG_IGN);
    MUST(prctl(PR_SET_NAME, "torture-main"));
    children_start(); /* forks, so before any thread */
    things_start();
    blockers_start();
    int udp = MUST(socket(AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0)), zero = 0;
    MUST(setsockopt(udp, IPPROTO_IPV6, IPV6_V6ONLY, &zero, sizeof zero));
    struct sockaddr_in6 a = { .sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port) };
    MUST(bind(udp, (void *)&a, sizeof a));
    spawn_thread(udp_echo, (void *)(intptr_t)udp);
    listener = MUST(open_listener());
    for (;;) {
        int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (fd < 0 && errno == EINVAL) { /* asked to rebind */
            close(listener);
            listener = open_listener();
            rebind_error = errno;
            rebinds++;
            if (listener < 0) pause(); /* the open connections still answer */
            continue;
        }
        if (fd < 0) {
            broken("accept: %s", strerror(errno));
            continue;
        }
        connections++;
        spawn_thread(serve, (void *)(intptr_t)fd);
    }
}
