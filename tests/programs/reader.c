/* Reads its memory as it is told, one word of a page, and nothing else of it (test_cache.py).
 *
 *   reader PORT PAGES
 *
 * Page I is noise that begins with the word word_of(I). Answers lines on TCP: `ping`, and `read THREADS FIRST COUNT SKIP SEED`, which has
 * each of so many threads read COUNT pages: from its share of all of them on, every SKIP-th behind FIRST, or, with a SEED, anywhere. The
 * answer is how many were wrong. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#define PAGE 4096UL
#define THREADS 16

static uint64_t *memory;
static unsigned long pages;

struct job {
    pthread_t thread;
    unsigned long first, count, skip, seed, wrong;
};

static uint64_t mixed(uint64_t n) {
    n = (n ^ n >> 30) * 0xbf58476d1ce4e5b9UL;
    n = (n ^ n >> 27) * 0x94d049bb133111ebUL;
    return n ^ n >> 31;
}

static uint64_t word_of(unsigned long page) { return mixed(page + 1); }

static void *carry_out(void *arg) {
    struct job *job = arg;
    for (unsigned long i = 0; i < job->count; i++) {
        unsigned long page = job->seed ? mixed(job->seed + i) % pages : (job->first + i * job->skip) % pages;
        job->wrong += *(volatile uint64_t *)(memory + page * PAGE / 8) != word_of(page);
    }
    return NULL;
}

static void answer(FILE *in, FILE *out) {
    char line[256];
    while (fgets(line, sizeof line, in)) {
        struct job jobs[THREADS], asked = { 0 };
        unsigned long threads, wrong = 0;
        if (sscanf(line, "read %lu %lu %lu %lu %lu", &threads, &asked.first, &asked.count, &asked.skip, &asked.seed) != 5 ||
            threads > THREADS)
            threads = 0;
        for (unsigned long i = 0; i < threads; i++) {
            jobs[i] = asked;
            jobs[i].first += i * (pages / threads);
            jobs[i].seed += asked.seed ? i * 1000003 : 0;
            if (pthread_create(&jobs[i].thread, NULL, carry_out, &jobs[i])) abort();
        }
        for (unsigned long i = 0; i < threads; i++) {
            pthread_join(jobs[i].thread, NULL);
            wrong += jobs[i].wrong;
        }
        fprintf(out, "wrong %lu\n", wrong);
        fflush(out);
    }
}

int main(int argc, char **argv) {
    struct sockaddr_in at = { .sin_family = AF_INET, .sin_port = htons(argc > 1 ? atoi(argv[1]) : 0) };
    int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0);
    pages = argc > 2 ? strtoul(argv[2], NULL, 10) : 0;
    memory = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return 1;
    for (unsigned long page = 0; page < pages; page++) {
        uint64_t word = word_of(page);
        for (unsigned long i = 0; i < PAGE / 8; i++, word = mixed(word)) memory[page * PAGE / 8 + i] = word;
    }
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, 16)) return 1;
    for (;;) {
        int fd = accept(listener, NULL, NULL);
        if (fd < 0) continue;
        FILE *in = fdopen(fd, "r"), *out = fdopen(dup(fd), "w");
        if (in && out) answer(in, out);
        if (in) fclose(in);
        if (out) fclose(out);
    }
}
