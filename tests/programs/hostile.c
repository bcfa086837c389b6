/* Fights the pager, which takes its memory out: threads that unmap, move, protect, drop and fill mappings without pause, children
 * that come and go, attempts at a userfaultfd and at tracing, memory up to its limit. Answers lines on TCP all the while.
 *
 *   hostile PORT
 *
 * "echo TEXT": TEXT. "tried": what it was refused. "fill MIB": touches so much memory and keeps it. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGES 256
#define PAGE 4096UL

static int uffd_error, trace_error;

static unsigned next(unsigned *seed) { return *seed = *seed * 1664525 + 1013904223, *seed >> 8; }

/* Every page that it finds mapped holds its own number or zero; otherwise pages were mixed up. */
static void look(volatile unsigned char *at, unsigned tag) {
    unsigned got = *(volatile unsigned *)at;
    if (got != 0 && got != tag) {
        fprintf(stderr, "a page of %x holds %x\n", tag, got);
        abort();
    }
}

static void *fight(void *arg) {
    unsigned seed = (unsigned)(unsigned long)arg, tag = seed | 0x80000000u;
    size_t size = PAGES * PAGE;
    unsigned char *map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) return NULL;
    for (;;) {
        unsigned page = next(&seed) % PAGES, count = 1 + next(&seed) % 16;
        if (page + count > PAGES) count = PAGES - page;
        unsigned char *at = map + page * PAGE;
        switch (next(&seed) % 8) {
        case 0:
            for (unsigned i = 0; i < count; i++) *(unsigned *)(at + i * PAGE) = tag;
            break;
        case 1:
            for (unsigned i = 0; i < count; i++) look(at + i * PAGE, tag);
            break;
        case 2: madvise(at, count * PAGE, MADV_DONTNEED); break;
        case 3: /* never a hole: another thread's mapping could come to lie in it */
            if (mmap(at, count * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED)
                abort();
            break;
        case 4: {
            void *to = mremap(map, size, size, MREMAP_MAYMOVE);
            if (to != MAP_FAILED) map = to; /* it is in pieces: refused as often as not */
            break;
        }
        case 5:
            mprotect(at, count * PAGE, PROT_NONE);
            mprotect(at, count * PAGE, PROT_READ | PROT_WRITE);
            break;
        case 6: {
            unsigned *other = mmap(NULL, count * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (other == MAP_FAILED) break;
            *other = tag;
            usleep(next(&seed) % 500);
            look((void *)other, tag);
            munmap(other, count * PAGE);
            break;
        }
        case 7: usleep(next(&seed) % 2000);
        }
    }
}

static void *breed(void *arg) {
    (void)arg;
    for (;;) {
        pid_t pid = fork();
        if (pid == 0) {
            usleep(1000);
            _exit(0);
        }
        if (pid > 0) waitpid(pid, NULL, 0);
        usleep(3000);
    }
}

static void *serve(void *arg) {
    int fd = (int)(long)arg;
    FILE *in = fdopen(fd, "r+");
    char line[4096];
    setvbuf(in, NULL, _IOLBF, 0);
    while (in && fgets(line, sizeof line, in)) {
        char answer[4200];
        if (!strncmp(line, "echo ", 5)) snprintf(answer, sizeof answer, "%s", line + 5);
        else if (!strncmp(line, "tried", 5))
            snprintf(answer, sizeof answer, "userfaultfd %s ptrace %s\n", strerrorname_np(uffd_error), strerrorname_np(trace_error));
        else if (!strncmp(line, "fill ", 5)) {
            size_t size = strtoul(line + 5, NULL, 10) << 20;
            memset(malloc(size), 1, size);
            snprintf(answer, sizeof answer, "filled\n");
        } else snprintf(answer, sizeof answer, "what?\n");
        if (write(fd, answer, strlen(answer)) < 0) break;
    }
    if (in) fclose(in);
    return NULL;
}

int main(int argc, char **argv) {
    if (argc != 2) return 2;
    uffd_error = syscall(SYS_userfaultfd, 0) < 0 ? errno : 0;
    pid_t child = fork();
    if (child == 0) pause();
    trace_error = ptrace(PTRACE_SEIZE, child, 0, 0) < 0 ? errno : 0; /* its own child: allowed, unless a filter says no */
    kill(child, SIGKILL); /* one that stays traced would not be hibernated, which is no fight */
    waitpid(child, NULL, 0);
    pthread_t thread;
    for (long i = 1; i <= 3; i++) pthread_create(&thread, NULL, fight, (void *)i);
    pthread_create(&thread, NULL, breed, NULL);
    int one = 1, listener = socket(AF_INET6, SOCK_STREAM, 0);
    struct sockaddr_in6 a = { .sin6_family = AF_INET6, .sin6_port = htons((unsigned short)atoi(argv[1])) };
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (void *)&a, sizeof a) || listen(listener, 16)) return 1;
    for (;;) {
        int fd = accept(listener, NULL, NULL);
        if (fd >= 0) pthread_create(&thread, NULL, serve, (void *)(long)fd);
    }
}
