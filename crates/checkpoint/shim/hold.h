/*
 * Copies of processes that hold their memory as it is at this moment, for one to read it from outside while they go on:
 * see hold.c.
 */
#ifndef KIP_HOLD_H
#define KIP_HOLD_H

#include <stdint.h>
#include <sys/ptrace.h>
#include <sys/types.h>

/* Processes in one request. */
#define MOST_HELD 4096

typedef long (*ptrace_fn)(enum __ptrace_request, pid_t, void *, void *);

/*
 * Forks each of these processes, at most MOST_HELD, of which this one is the tracer and which stand still, by a system call of their own. The
 * copies never run anything of the program's, have no open file, and end with this process. Gives their pids; returns an errno,
 * with none left, if one of them cannot be made.
 */
int hold(ptrace_fn real_ptrace, const uint32_t *pids, uint32_t count, uint32_t *holders);

#endif
