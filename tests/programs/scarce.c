/* Has used up a limit, or has guards in its memory, and looks whether that is still so (test_scarce.py).
 *
 *   scarce PORT WHAT [hard]
 *
 * One client at a time; for each line it answers "ok", or what has changed. WHAT is files, space, data, locked, future (memory
 * is locked as it is mapped), processes, size, mappings or guards. The soft limit is used up; with hard the hard limit is the same. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096UL
#define PAGES 512UL
#define INSTALL 102 /* MADV_GUARD_INSTALL */

static char *memory;
static struct rlimit limit;
static int resource = -1, expected, hard;
static sigjmp_buf back;

static char *map(size_t length) {
    char *at = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return at == MAP_FAILED ? NULL : at;
}

static int is_guard(unsigned long page) { return page % 64 == 7 || page % 64 == 8; }

/* What a further use of what is used up ends with. */
static int use(const char *what) {
    errno = 0;
    if (!strcmp(what, "files")) {
        int fd = dup(0);
        return fd < 0 ? errno : 0;
    }
    if (!strcmp(what, "space") || !strcmp(what, "data") || !strcmp(what, "future") || !strcmp(what, "mappings"))
        return map(16 * PAGE) ? 0 : errno;
    if (!strcmp(what, "locked"))
        return mlock(memory + 8 * PAGE, PAGE) ? errno : 0;
    if (!strcmp(what, "processes")) {
        pid_t child = fork();
        if (child == 0)
            _exit(0);
        if (child > 0)
            waitpid(child, NULL, 0);
        return child < 0 ? errno : 0;
    }
    if (!strcmp(what, "size")) {
        int fd = memfd_create("size", 0);
        int error = ftruncate(fd, PAGE) ? errno : 0;
        close(fd);
        return error;
    }
    return 0;
}

static void set(int which, rlim_t most) {
    resource = which;
    if (getrlimit(which, &limit))
        abort();
    limit.rlim_cur = most;
    if (hard)
        limit.rlim_max = most;
    if (setrlimit(which, &limit))
        abort();
}

static unsigned long field(const char *name) {
    char line[256];
    unsigned long value = 0;
    FILE *status = fopen("/proc/self/status", "r");
    while (status && fgets(line, sizeof line, status))
        if (!strncmp(line, name, strlen(name)))
            value = strtoul(line + strlen(name), NULL, 10);
    if (status)
        fclose(status);
    return value << 10;
}

static void use_up(const char *what) {
    if (!strcmp(what, "files")) {
        set(RLIMIT_NOFILE, 32);
        while (dup(0) >= 0)
            ;
        expected = EMFILE;
    } else if (!strcmp(what, "space")) {
        set(RLIMIT_AS, field("VmSize:"));
        expected = ENOMEM;
    } else if (!strcmp(what, "data")) {
        set(RLIMIT_DATA, field("VmData:"));
        expected = ENOMEM;
    } else if (!strcmp(what, "locked")) {
        set(RLIMIT_MEMLOCK, 8 * PAGE);
        if (mlock(memory, 8 * PAGE))
            abort();
        expected = ENOMEM;
    } else if (!strcmp(what, "future")) {
        set(RLIMIT_MEMLOCK, 8 * PAGE);
        if (mlock(memory, 8 * PAGE) || mlockall(MCL_FUTURE))
            abort();
        expected = EAGAIN;
    } else if (!strcmp(what, "processes")) {
        set(RLIMIT_NPROC, 0);
        expected = EAGAIN;
    } else if (!strcmp(what, "size")) {
        signal(SIGXFSZ, SIG_IGN);
        set(RLIMIT_FSIZE, 0);
        expected = EFBIG;
    } else if (!strcmp(what, "mappings")) {
        char *wide = map(1UL << 29);
        /* Neighbours of different protection cannot be one mapping. */
        for (unsigned long page = 0; page < (1UL << 29) / PAGE; page += 2)
            if (mprotect(wide + page * PAGE, PAGE, PROT_READ))
                break;
        while (mmap(NULL, PAGE, PROT_READ, MAP_SHARED | MAP_ANONYMOUS, -1, 0) != MAP_FAILED)
            ;
        expected = ENOMEM;
    } else if (!strcmp(what, "guards")) {
        for (unsigned long page = 0; page < PAGES; page += 64)
            if (madvise(memory + (page + 7) * PAGE, 2 * PAGE, INSTALL))
                abort();
    }
}

static void on_fault(int signal) { siglongjmp(back, signal); }

static const char *wrong(const char *what) {
    struct rlimit now;
    int guards = !strcmp(what, "guards");
    for (volatile unsigned long page = 0; page < PAGES; page++) {
        volatile char *at = memory + page * PAGE;
        if (guards && is_guard(page)) {
            if (!sigsetjmp(back, 1)) {
                (void)*at;
                return "a guard can be read";
            }
        } else if (*at != (char)(page * 3 + 1)) {
            return "a page is not what it was";
        } else {
            *at = *at;
        }
    }
    if (resource >= 0 && (getrlimit(resource, &now) || memcmp(&now, &limit, sizeof now)))
        return "the limit has changed";
    return use(what) == expected ? NULL : "there is room that was not there, or another error";
}

int main(int argc, char **argv) {
    if (argc < 3)
        return 2;
    hard = argc > 3;
    memory = map(PAGES * PAGE);
    for (unsigned long page = 0; page < PAGES; page++)
        memory[page * PAGE] = (char)(page * 3 + 1);
    struct sigaction action = { .sa_handler = on_fault };
    sigaction(SIGSEGV, &action, NULL);
    sigaction(SIGBUS, &action, NULL);
    struct sockaddr_in6 address = { .sin6_family = AF_INET6, .sin6_port = htons(atoi(argv[1])), .sin6_addr = in6addr_any };
    int listener = socket(AF_INET6, SOCK_STREAM, 0), one = 1, used = 0;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 4))
        return 1;
    for (;;) {
        char line[256], said[256];
        int client = accept(listener, NULL, NULL);
        if (client < 0)
            continue;
        if (!used++)
            use_up(argv[2]);
        ssize_t got;
        while ((got = read(client, line, sizeof line)) > 0) {
            const char *what = wrong(argv[2]);
            int length = snprintf(said, sizeof said, "%s\n", what ? what : "ok");
            if (write(client, said, length) != length)
                break;
        }
        close(client);
    }
}
