/* The plan as crates/checkpoint/src/plan.rs writes it, where everything lies in a process that is being rebuilt, and what is
 * said over the socket. Structures are of 64-bit words; places are offsets from the plan's start. */
#ifndef KIP_RESTORER_PLAN_H
#define KIP_RESTORER_PLAN_H

#include "kernel.h"

/* Where no program has anything: above the 46 bits in which V8 and others choose addresses by chance, below where programs are
 * loaded (0x555555554000, load_elf_binary in the kernel's fs/binfmt_elf.c) and where mmap(2) goes down from the stack. */
#define AREA 0x4a0000000000UL
#define AREA_END 0x4a1000000000UL
#define MAIN_STACK (AREA + 0x01000000UL)
#define MAIN_STACK_SIZE 0x10000UL
#define PLAN (AREA + 0x10000000UL)
#define VDSO (AREA + 0x20000000UL)
#define STACKS (AREA + 0x30000000UL)
#define STACK_SIZE 0x2000UL
#define COPY (AREA + 0x40000000UL)
#define SHARED (AREA + 0x100000000UL)
#define USER_END 0x7ffffffff000UL
#define PAGE 4096UL

struct span {
    word at, count;
};

struct plan {
    word magic, size;
    word base;     /* number of the first descriptor of ours; the program's are all below */
    struct span files, shared, tasks;
    struct span vdso; /* struct piece */
    struct span terminals; /* struct session */
    struct span settings, objects; /* struct setting, struct object: System V IPC */
    word init;     /* offset of the path of kip-init */
    word init_arg; /* offset of the pid of the program, in decimal */
};

struct file {
    word path, flags, position, size; /* size: ~0 where it does not matter */
};

enum { SHARED_READ_ONLY = 1, SHARED_REMOVED = 2 /* it goes with its last attachment */ };
/* Memory that several mappings share: made or attached once by pid 1. */
struct shared {
    word size, prefilled; /* page runs */
    struct span pages;
    word segment, how;    /* segment: of shmget(2); ~0: none */
    word file;            /* a descriptor of ours of a memory file; ~0: none */
};

/* What is written to a file. */
struct setting {
    word path, text, length;
};

enum { OBJECT_SEGMENT = 0, OBJECT_SEMAPHORES = 1, OBJECT_QUEUE = 2 };
/* System V IPC. */
struct object {
    word kind, id, key, mode, uid, gid, cuid, cgid;
    word size;            /* SEGMENT: bytes; SEMAPHORES: how many; QUEUE: bytes that it may have */
    struct span contents; /* SEMAPHORES: u16; QUEUE: struct queued */
    struct setting next;  /* has the next object of its kind get its id */
};

/* A message: its type and text as msgsnd(2) takes them, and bytes of the text. */
struct queued {
    word at, size;
};

/* A session that has a terminal. */
struct session {
    word leader; /* index of its task */
    word ours, foreground; /* the group in the foreground; 0: the leader's own */
};

struct piece {
    word offset, size, target; /* offset from the start of the vdso, two's complement */
};

enum { TASK_ALIVE = 0, TASK_DEAD = 1, TASK_GHOST = 2, TASK_STOPPED = 3 };
struct task {
    word pid, maker, sibling; /* the process that forks it, as its own child or (sibling) as its parent's; ~0 for pid 1 */
    word early;               /* before the maker's setsid(2) */
    word leads_session, group, lends; /* group: 0 as it was made, else its number, when it has forked; lends: to be led until this one is in it */
    word state, status; /* DEAD: a zombie that ended with this wait(2) status. GHOST: ends when it has forked all of its own.
                        * STOPPED: by a signal; status 1: its parent has yet to be told */
    struct span descriptors, mappings, pages, signals, limits, timers, threads, filters, locks, watches, vdso, of_processes;
    word directory, umask, executable, dumpable, thp_disabled, subreaper, personality, membarrier;
    word interval[6]; /* real (due, every: ns; due on CLOCK_MONOTONIC), virtual, prof (left, every: ns) */
    word mm[11];      /* start_code .. env_end as in struct prctl_mm_map */
    struct span auxv; /* bytes */
    struct span pending; /* siginfo_t, 128 bytes each */
    struct span populate; /* struct vector: longer runs of anonymous memory that will be filled */
    struct span rings;    /* struct ring */
    struct span settings; /* struct setting, of the process itself */
    word device;          /* /dev/userfaultfd, if some of its memory comes later; else ~0 */
    word root;            /* of one that has called chroot(2); else ~0 */
    word inherits;        /* mappings from its maker, which forks it after those of other kinds */
};

_Static_assert(sizeof(struct task) == 71 * sizeof(word), "as plan/tasks.rs writes it");

struct descriptor {
    word number, ours, flags;
};

enum { MAPPING_PLAIN = 0, MAPPING_SHARED = 1, MAPPING_GUARD = 2 /* in mappings that come before it */ };
enum { MADE_ALONE = 0, MADE_BEFORE = 1 /* it forks those that inherit */, MADE_BY_MAKER = 2 };
struct mapping {
    word start, end, protection, flags, ours, offset, kind, advice; /* kind SHARED: ours is the index of struct shared */
    word written; /* has pages to fill in */
    word made;    /* by what */
};

/* A run of pages that follow each other in memory; runs of one list follow each other in the file. */
struct pages {
    word ours, position;
    struct span runs; /* struct iovec */
};

struct vector {
    word base, length;
};

/* Of io_setup(2). Its first page as it was is there in a file. */
struct ring {
    word address, length, requests, ours, position;
};

struct signal {
    word number, handler, flags, restorer, mask;
};

struct limit {
    word resource, soft, hard;
};

struct timer {
    word id, clock, signal, notify, value, thread, on, due, every; /* due: ns on the clock `on`; 0: left */
};

struct lock {
    word kind, type, number, start, length; /* kind 1 POSIX, 2 flock, 4 OFD */
};

/* What is put into an epoll set once more: a signalfd or pidfd, which the kernel drops there when the process that added it goes, and
 * a FIFO without a name, of which the set knows the open file that was held. */
struct watch {
    word set, number, events, data;
};

/* A pidfd, or, with a path, a file of proc(5): to be opened again when its process is there. A pidfd whose process has ended and gone
 * is of a process of that number that ends at once. */
struct of_process {
    word number, process, flags, descriptor_flags, gone, path, position;
};

struct filter {
    word at, count, flags;
};

struct thread {
    word id, clear_tid, robust, robust_size, stack, stack_size, stack_flags, death_signal, policy, priority, nice, comm;
    word rseq, rseq_size, rseq_signature, credentials;
    struct span pending;
};

_Static_assert(sizeof(struct thread) == 18 * sizeof(word), "as plan/tasks.rs writes it");

struct credentials {
    word uid, gid, euid, egid, suid, sgid, fsuid, fsgid;
    struct span groups; /* u32 */
    word inheritable, permitted, effective, bounding, ambient, securebits, no_new_privs;
};

/* --- What goes over the socket --- */

/* From the daemon, with `count` descriptors; the first of all is the file with the plan in it. The last one, with none, comes when the
 * daemon has looked at the restorer's mounts. `waited`: so long ago, nanoseconds,
 * came what the program is woken for, if that came by the network; else 0. `taken_within`: when the program has taken that, nanoseconds
 * from its first instruction on. */
struct packet {
    word base, plan_at, plan_size, count, more, waited, taken_within;
};

enum { WORD_FAILED = 1, WORD_TASK = 2, WORD_THREAD = 3, WORD_LAZY = 4, WORD_ALARM = 5, WORD_EXPIRED = 6 };
/* To the daemon; that of a task or thread carries its pid, which the kernel translates, as SCM_CREDENTIALS; WORD_LAZY a
 * userfaultfd as SCM_RIGHTS. WORD_ALARM and WORD_EXPIRED are of a periodic timer that came due after something had come from the
 * network: the daemon sends its signal a little after the program goes on. WORD_ALARM: the interval timer's. WORD_EXPIRED: a
 * POSIX timer's: `step` its id and, from bit 32 on, the signal; `error` the value; `detail` the thread, or 0, and, from bit 32 on, how
 * many more of its expirations were missed. */
struct said {
    word kind, task, step, error, detail;
};

/* Steps, for messages. */
enum { AT_START = 1, AT_RECEIVE, AT_PLAN, AT_OPEN, AT_SIZE, AT_SHARED, AT_FORK, AT_GROUP, AT_DESCRIPTOR, AT_DIRECTORY, AT_MAP,
       AT_PAGES, AT_PROTECT, AT_VDSO, AT_MM, AT_SIGNAL, AT_LIMIT, AT_TIMER, AT_THREAD, AT_SETTING, AT_CREDENTIALS, AT_FILTER,
       AT_LOCK, AT_WATCH, AT_EXEC, AT_LAZY, AT_PIDFD, AT_TERMINAL, AT_SYSTEM_V, AT_RING, AT_ROOT };

#endif
