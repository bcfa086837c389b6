/* The program of ours that the sleep tests torture: it holds one of everything the kernel offers and notices
 * when any of it changes.
 *
 * It owns: threads blocked in every kind of call, timers of every kind, children, files, locks, sockets, memory.
 * It never: retries an interrupted call, hides a short read, or prints anything but what it is asked for.
 * Every surprise is kept until it is asked for by the command `check`. */
#ifndef TORTURE_H
#define TORTURE_H
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define DIR_PATH "/tmp/torture"

/* Signals, each with one purpose; all are blocked in every thread. */
#define SIG_FOR_SIGNALFD SIGUSR1
#define SIG_FOR_SIGWAIT SIGUSR2
#define SIG_FOR_TIMER (SIGRTMIN + 1)
#define SIG_KEPT_PENDING (SIGRTMIN + 2)

/* Remembers one surprise; printf-like. Never fails. */
void broken(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* Ends the program at once: a set-up step failed, which is not what is being tested. */
void die(const char *what) __attribute__((noreturn));
#define MUST(call) \
    ({ __auto_type r_ = (call); if ((long)r_ == -1) die(#call); r_; })
#define EXPECT(cond, ...) \
    do { if (!(cond)) broken(__VA_ARGS__); } while (0)

/* Whether TORTURE_SKIP, a list with commas, has the word: what CRIU can restore and Kip's own restorer cannot. */
bool skipped(const char *word);
/* Nanoseconds of a clock. */
int64_t now_ns(clockid_t clock);
/* The n-th byte pattern of a seed: fills and compares memory. */
void fill(void *p, size_t n, uint64_t seed);
bool same(const void *p, size_t n, uint64_t seed);
/* For so long a check waits for what a thread, a child or an orphan is to do; on a starved machine as long as timers may be late. */
extern long patience_ms;
/* Starts a detached thread. */
void spawn_thread(void *(*run)(void *), void *arg);

/* blockers.c: one thread blocked for ever in each kind of call. */
void blockers_start(void);
void blockers_check(void);
int blockers_count(void);

/* timers.c: timers and calls with a time-out. Returns an id, or -1 for a kind that does not exist. */
int timers_arm(const char *kind, int64_t ms, int64_t interval_ms);
/* One line about that timer. */
void timers_result(int id, char *out, size_t size);
/* Remembers every one-shot timer that fired early or more than tolerance late, or is overdue. */
void timers_check(int64_t tolerance_ms);
const char *timers_kinds(void);

/* things.c: descriptors, memory and locks. children.c: processes. */
void things_start(void);
void things_check(void);
void things_eat(size_t mib);
void children_start(void);
void children_check(void);
/* Asks the child one thing and returns its one-byte answer; -1 if it does not answer in time. */
int child_ask(char question);
int child_pid(void);
/* The memory that parent and child share; both count in it. */
extern _Atomic long *shared_counter;
#endif
