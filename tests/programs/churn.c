/* Threads that come and go all the time, a thousand at once, while others only run; it notices what a sleep of it breaks.
 *
 *   churn PORT THREADS
 *
 * Each thread fills a part of its stack with its number, waits or works for a moment, and looks whether it is still there. For each
 * line a client gets "ok", or how many threads found something else. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static volatile unsigned long wrong, ended;

static void *live(void *arg) {
    uint64_t number = (uint64_t)arg, words[256];
    for (unsigned i = 0; i < 256; i++)
        words[i] = number * 31 + i;
    if (number % 8) {
        struct timespec moment = { 0, 1000000 + number % 97 * 1000000 };
        nanosleep(&moment, NULL);
    } else {
        for (volatile unsigned i = 0; i < 20000; i++)
            ;
    }
    for (unsigned i = 0; i < 256; i++)
        if (((volatile uint64_t *)words)[i] != number * 31 + i) {
            __atomic_fetch_add(&wrong, 1, __ATOMIC_SEQ_CST);
            break;
        }
    __atomic_fetch_add(&ended, 1, __ATOMIC_SEQ_CST);
    return NULL;
}

static void *keep_making(void *arg) {
    unsigned long most = (unsigned long)arg, begun = 0;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, 64 << 10);
    for (;;) {
        pthread_t thread;
        if (begun - ended < most && !pthread_create(&thread, &attributes, live, (void *)(uintptr_t)begun))
            begun++;
        else
            nanosleep(&(struct timespec){ 0, 2000000 }, NULL);
    }
    return NULL;
}

int main(int argc, char **argv) {
    if (argc != 3)
        return 2;
    pthread_t maker;
    pthread_create(&maker, NULL, keep_making, (void *)strtoul(argv[2], NULL, 10));
    struct sockaddr_in6 address = { .sin6_family = AF_INET6, .sin6_port = htons(atoi(argv[1])), .sin6_addr = in6addr_any };
    int listener = socket(AF_INET6, SOCK_STREAM, 0), one = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 4))
        return 1;
    for (;;) {
        char line[256], said[64];
        int client = accept(listener, NULL, NULL);
        ssize_t got;
        while (client >= 0 && (got = read(client, line, sizeof line)) > 0) {
            int length = wrong ? snprintf(said, sizeof said, "%lu\n", wrong) : snprintf(said, sizeof said, "ok\n");
            if (write(client, said, length) != length)
                break;
        }
        close(client);
    }
}
