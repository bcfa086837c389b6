/* `threads MAKERS IDLE`: makes threads and ends them, all the time. MAKERS threads do, each with a stack that is mapped for one thread
 * and unmapped after it; IDLE more threads wait, each with a stack that it has used.
 *
 * Answers each client of port 7000 with a line "MADE US": how many were made, and when that was, microseconds. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "listen.h"

enum { STACK = 128 << 10 };
static atomic_ulong made;

static void *one(void *nothing)
{
	volatile char bytes[8192];
	memset((void *)bytes, 1, sizeof bytes);
	made++;
	return nothing;
}

static void *idle(void *nothing)
{
	one(nothing);
	for (;;)
		pause();
	return nothing;
}

static void *maker(void *nothing)
{
	for (;;) {
		pthread_t thread;
		pthread_attr_t attr;
		void *stack = mmap(NULL, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		pthread_attr_init(&attr);
		pthread_attr_setstack(&attr, stack, STACK);
		if (stack == MAP_FAILED || pthread_create(&thread, &attr, one, NULL))
			exit(1);
		pthread_join(thread, NULL);
		pthread_attr_destroy(&attr);
		munmap(stack, STACK);
	}
	return nothing;
}

int main(int count, char **words)
{
	int n, listener;
	pthread_t thread;
	pthread_attr_t small;
	pthread_attr_init(&small);
	pthread_attr_setstacksize(&small, STACK);
	for (n = 0; n < (count > 2 ? atoi(words[2]) : 0); n++)
		if (pthread_create(&thread, &small, idle, NULL))
			return 1;
	for (n = 0; n < (count > 1 ? atoi(words[1]) : 1); n++)
		pthread_create(&thread, NULL, maker, NULL);
	listener = listen_7000();
	for (;;) {
		struct timespec t;
		int client = accept(listener, NULL, NULL);
		clock_gettime(CLOCK_MONOTONIC, &t);
		dprintf(client, "%lu %lld\n", made, t.tv_sec * 1000000LL + t.tv_nsec / 1000);
		close(client);
	}
}
