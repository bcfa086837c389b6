/* Rebuilds a process tree from a plan, as pid 1 of a new sandbox, and then becomes kip-init again.
 *
 * The launcher executes it with every capability of the sandbox's user namespace and one descriptor, 3: a SEQPACKET
 * socket to the daemon. From there come the plan and every descriptor that outlived the processes (struct packet). Pid 1
 * opens the files of the whole tree, makes what memory is shared, forks its children and executes kip-init, which waits
 * for the program as before. Each child forks its own, then puts memory, descriptors, signals, limits, threads and
 * credentials in place, tells its pids (struct word), closes the socket and waits: so the socket's end means that
 * everybody is ready, or dead. The daemon, which traces the threads, then gives them their registers and unmaps our area.
 *
 * The plan is made by crates/checkpoint/src/plan.rs: 64-bit words, places in it are offsets from its start. Nothing in it
 * is checked here beyond what the kernel checks; it has a checksum, and nothing of it comes from the tenant unread.
 *
 * All of ours lies in one area of addresses that the plan's maker has found free in every process: text and data at its
 * start, moved there into anonymous memory first (the kernel lets a process change its executable only if nothing of the
 * old one is mapped), then the stacks, the plan, and memory on its way to its place.
 * Crash: whatever fails tells the step and ends the process; the daemon kills the rest and lets CRIU do it.
 * Sources: clone3(2), prctl(2) PR_SET_MM, rseq(2), seccomp(2), mremap(2).
 */

#if !defined(__x86_64__)
#error "kip-restore knows x86_64 only"
#endif

typedef unsigned long word;
typedef unsigned int u32;

#define AREA 0x2000000000UL
#define AREA_END 0x3000000000UL
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

enum { SYS_read = 0, SYS_close = 3, SYS_lseek = 8, SYS_mmap = 9, SYS_mprotect = 10, SYS_munmap = 11,
       SYS_rt_sigaction = 13, SYS_rt_sigprocmask = 14, SYS_mremap = 25, SYS_madvise = 28, SYS_dup3 = 292,
       SYS_setitimer = 38, SYS_sendmsg = 46, SYS_recvmsg = 47, SYS_execve = 59, SYS_exit_group = 231, SYS_kill = 62,
       SYS_fcntl = 72, SYS_flock = 73, SYS_fchdir = 81, SYS_umask = 95, SYS_setpgid = 109, SYS_setsid = 112,
       SYS_setgroups = 116, SYS_setresuid = 117, SYS_setresgid = 119, SYS_setfsuid = 122, SYS_setfsgid = 123,
       SYS_capset = 126, SYS_sigaltstack = 131, SYS_personality = 135, SYS_setpriority = 141, SYS_sched_setscheduler = 144,
       SYS_mlock = 149, SYS_prctl = 157, SYS_futex = 202, SYS_set_tid_address = 218, SYS_timer_create = 222,
       SYS_timer_settime = 223, SYS_clock_gettime = 228, SYS_epoll_ctl = 233, SYS_openat = 257, SYS_set_robust_list = 273,
       SYS_preadv = 295, SYS_prlimit64 = 302, SYS_seccomp = 317, SYS_fstat = 5, SYS_rseq = 334, SYS_clone3 = 435,
       SYS_close_range = 436, SYS_membarrier = 324,
       SYS_rt_sigtimedwait = 128, SYS_rt_sigqueueinfo = 129, SYS_rt_tgsigqueueinfo = 297, SYS_waitid = 247,
       SYS_sched_yield = 24 };

enum { EPERM = 1, EINTR = 4, EAGAIN = 11, EINVAL = 22 };
enum { PROT_READ = 1, PROT_WRITE = 2, PROT_EXEC = 4, MAP_SHARED = 1, MAP_PRIVATE = 2, MAP_FIXED = 0x10,
       MAP_ANONYMOUS = 0x20, MREMAP_MAYMOVE = 1, MREMAP_FIXED = 2 };
enum { CLONE_VM = 0x100, CLONE_FS = 0x200, CLONE_FILES = 0x400, CLONE_SIGHAND = 0x800, CLONE_THREAD = 0x10000,
       CLONE_SYSVSEM = 0x40000, CLONE_PARENT = 0x8000, SIGCHLD = 17, SIGALRM = 14 };
enum { P_PID = 1, WEXITED = 4, WNOWAIT = 0x1000000, RLIMIT_CORE = 4, SIG_SETMASK = 2, SIG_UNBLOCK = 1, INFO_SIZE = 128 };
enum { O_CLOEXEC = 02000000, AT_FDCWD = -100, AT_SYSINFO_EHDR = 33 };

/* --- The plan --- */

struct span {
    word at, count;
};

struct plan {
    word magic, size;
    word base;     /* number of the first descriptor of ours; the program's are all below */
    struct span files, shared, tasks;
    struct span vdso; /* struct piece */
    word init;     /* offset of the path of kip-init */
    word init_arg; /* offset of the pid of the program, in decimal */
};

struct file {
    word path, flags, position, size; /* size: ~0 where it does not matter */
};

/* Memory that several mappings share: made once by pid 1. */
struct shared {
    word size, prefilled; /* page runs */
    struct span pages;
};

struct piece {
    word offset, size, target; /* offset from the start of the vdso, two's complement */
};

enum { TASK_ALIVE = 0, TASK_DEAD = 1, TASK_GHOST = 2 };
struct task {
    word pid, maker, sibling; /* who forks it, as its child or as its own parent's; ~0 for pid 1 */
    word leads_session, group; /* group: 0 as the maker's, else its number */
    word state, status; /* DEAD: a zombie that ended with this wait(2) status. GHOST: the leader of a session, gone */
    struct span descriptors, mappings, pages, signals, limits, timers, threads, filters, locks, watches, vdso;
    word directory, umask, executable, dumpable, thp_disabled, subreaper, personality, membarrier;
    word interval[6]; /* real (due, every: ns; due on CLOCK_MONOTONIC), virtual, prof (left, every: ns) */
    word mm[11];      /* start_code .. env_end as in struct prctl_mm_map */
    struct span auxv; /* bytes */
    struct span pending; /* siginfo_t, 128 bytes each */
};

_Static_assert(sizeof(struct task) == 58 * sizeof(word), "as plan/tasks.rs writes it");

struct descriptor {
    word number, ours, flags;
};

enum { MAPPING_PLAIN = 0, MAPPING_SHARED = 1 };
struct mapping {
    word start, end, protection, flags, ours, offset, kind, advice; /* kind SHARED: ours is the index of struct shared */
    word written; /* has pages to fill in */
};

/* A run of pages that follow each other in memory; runs of one list follow each other in the file. */
struct pages {
    word ours, position;
    struct span runs; /* struct iovec */
};

struct vector {
    word base, length;
};

struct signal {
    word number, handler, flags, restorer, mask;
};

struct limit {
    word resource, soft, hard;
};

struct timer {
    word id, clock, signal, notify, value, thread, absolute, due, every; /* due: ns on the clock of the plan's maker */
};

struct lock {
    word kind, type, number, start, length; /* kind 1 POSIX, 2 flock, 4 OFD */
};

/* A signalfd in an epoll set: the kernel drops it there when the process that added it goes. */
struct watch {
    word set, number, events, data;
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

/* From the daemon, with `count` descriptors; the first of all is the file with the plan in it. */
struct packet {
    word base, plan_at, plan_size, count, more;
};

enum { WORD_FAILED = 1, WORD_TASK = 2, WORD_THREAD = 3 };
/* To the daemon; that of a task or thread carries its pid, which the kernel translates, as SCM_CREDENTIALS. */
struct said {
    word kind, task, step, error, detail;
};

/* Steps, for messages. */
enum { AT_START = 1, AT_RECEIVE, AT_PLAN, AT_OPEN, AT_SIZE, AT_SHARED, AT_FORK, AT_GROUP, AT_DESCRIPTOR, AT_DIRECTORY, AT_MAP,
       AT_PAGES, AT_PROTECT, AT_VDSO, AT_MM, AT_SIGNAL, AT_LIMIT, AT_TIMER, AT_THREAD, AT_SETTING, AT_CREDENTIALS, AT_FILTER,
       AT_LOCK, AT_WATCH, AT_EXEC };

/* --- The kernel --- */

static inline long call(long number, word a, word b, word c, word d, word e, word f)
{
    long result;
    register word r10 __asm__("r10") = d;
    register word r8 __asm__("r8") = e;
    register word r9 __asm__("r9") = f;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
}

#define call1(n, a) call(n, (word)(a), 0, 0, 0, 0, 0)
#define call2(n, a, b) call(n, (word)(a), (word)(b), 0, 0, 0, 0)
#define call3(n, a, b, c) call(n, (word)(a), (word)(b), (word)(c), 0, 0, 0)
#define call4(n, a, b, c, d) call(n, (word)(a), (word)(b), (word)(c), (word)(d), 0, 0)
#define call5(n, a, b, c, d, e) call(n, (word)(a), (word)(b), (word)(c), (word)(d), (word)(e), 0)
#define call6(n, a, b, c, d, e, f) call(n, (word)(a), (word)(b), (word)(c), (word)(d), (word)(e), (word)(f))

struct message {
    void *name;
    u32 name_size, pad;
    struct vector *vectors;
    word vector_count;
    void *control;
    word control_size;
    int flags, pad2;
};

enum { SOL_SOCKET = 1, SCM_RIGHTS = 1, SCM_CREDENTIALS = 2, MSG_CMSG_CLOEXEC = 0x40000000, MSG_TRUNC = 0x20,
       MSG_CTRUNC = 8, MOST_DESCRIPTORS = 250, FIRST_SOCKET = 3 };

struct clone {
    word flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls, set_tid, set_tid_size, cgroup;
};

static int socket_at = FIRST_SOCKET;
static word task_now = ~0UL;
static word received;          /* descriptors */
static u32 threads_ready;
static const u32 never;

static struct plan *plan(void)
{
    return (struct plan *)PLAN;
}

static void *at(word offset)
{
    return (void *)(PLAN + offset);
}

static int ours(word index)
{
    return (int)(plan()->base + index);
}

static void tell(struct said *said, word pid)
{
    struct {
        word size;
        int level, type;
        int pid, uid, gid, pad;
    } control = { 16 + 12, SOL_SOCKET, SCM_CREDENTIALS, (int)pid, 0, 0, 0 };
    struct vector vector = { (word)said, sizeof *said };
    struct message message = { 0, 0, 0, &vector, 1, pid ? &control : 0, pid ? sizeof control : 0, 0, 0 };
    while (call3(SYS_sendmsg, socket_at, &message, 0) == -EINTR)
        ;
}

__attribute__((noreturn)) static void fail(word step, long error, word detail)
{
    struct said said = { WORD_FAILED, task_now, step, (word)-error, detail };
    tell(&said, 0);
    for (;;)
        call1(SYS_exit_group, 1);
}

static long must(long result, word step, word detail)
{
    if (result < 0)
        fail(step, result, detail);
    return result;
}

static void copy(void *to, const void *from, word bytes)
{
    __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes) : : "memory");
}

/* Needed by the compiler for larger structures. */
void *memset(void *to, int value, word bytes)
{
    void *result = to;
    __asm__ volatile("rep stosb" : "+D"(to), "+c"(bytes) : "a"(value) : "memory");
    return result;
}

void *memcpy(void *to, const void *from, word bytes)
{
    copy(to, from, bytes);
    return to;
}

/* --- Pid 1 --- */

/* Reads every packet; descriptor i gets the number base + i. */
static void receive(void)
{
    static char control[16 + MOST_DESCRIPTORS * sizeof(int) + 16] __attribute__((aligned(8)));
    struct packet packet = { 0, 0, 0, 0, 1 };
    word size = 0, place = 0;
    while (packet.more) {
        struct vector vector = { (word)&packet, sizeof packet };
        struct message message = { 0, 0, 0, &vector, 1, control, sizeof control, 0, 0 };
        long length;
        do
            length = call3(SYS_recvmsg, socket_at, &message, MSG_CMSG_CLOEXEC);
        while (length == -EINTR);
        must(length, AT_RECEIVE, 0);
        if (length != sizeof packet || message.flags & (MSG_TRUNC | MSG_CTRUNC))
            fail(AT_RECEIVE, -EINVAL, 1);
        word got = packet.count ? (*(word *)control - 16) / sizeof(int) : 0;
        if (got != packet.count)
            fail(AT_RECEIVE, -EINVAL, 2);
        if (!received) {
            size = packet.plan_size;
            place = packet.plan_at;
            socket_at = (int)must(call3(SYS_dup3, FIRST_SOCKET, packet.base - 1, O_CLOEXEC), AT_RECEIVE, 3);
        }
        int *fds = (int *)(control + 16);
        for (word i = 0; i < got; i++, received++) {
            must(call3(SYS_dup3, fds[i], packet.base + received, O_CLOEXEC), AT_RECEIVE, 4 + i);
            call1(SYS_close, fds[i]);
        }
    }
    must(call6(SYS_mmap, PLAN, (size + PAGE - 1) & -PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, packet.base,
               place),
         AT_PLAN, 0);
    if (plan()->magic != 0x4e414c5050494bUL || plan()->size != size || plan()->base != packet.base)
        fail(AT_PLAN, -EINVAL, 1);
}

static void open_files(void)
{
    struct file *file = at(plan()->files.at);
    for (word i = 0; i < plan()->files.count; i++, file++) {
        long fd = must(call4(SYS_openat, AT_FDCWD, at(file->path), file->flags | O_CLOEXEC, 0), AT_OPEN, file->path);
        if (~file->size) {
            word status[18];
            must(call2(SYS_fstat, fd, status), AT_OPEN, file->path);
            if (status[6] != file->size)
                fail(AT_SIZE, -EINVAL, file->path);
        }
        if (file->position)
            must(call3(SYS_lseek, fd, file->position, 0), AT_OPEN, file->path);
        if (fd != ours(received + i)) {
            must(call3(SYS_dup3, fd, ours(received + i), O_CLOEXEC), AT_OPEN, file->path);
            call1(SYS_close, fd);
        }
    }
}

static void read_pages(struct span list)
{
    struct pages *pages = at(list.at);
    for (word i = 0; i < list.count; i++, pages++) {
        struct vector *run = at(pages->runs.at);
        word left = pages->runs.count, position = pages->position;
        while (left) {
            long got = must(call5(SYS_preadv, ours(pages->ours), run, left > 1024 ? 1024 : left, position, 0), AT_PAGES,
                            run->base);
            if (!got)
                fail(AT_PAGES, -EINVAL, run->base);
            position += got;
            while (left && (word)got >= run->length) {
                got -= run->length;
                run++, left--;
            }
            if (got) {
                run->base += got;
                run->length -= got;
            }
        }
    }
}

static void make_shared(void)
{
    struct shared *shared = at(plan()->shared.at);
    word address = SHARED;
    for (word i = 0; i < plan()->shared.count; i++, shared++) {
        must(call6(SYS_mmap, address, shared->size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0),
             AT_SHARED, i);
        read_pages(shared->pages);
        shared->prefilled = address;
        address += (shared->size + PAGE - 1) & -PAGE;
    }
}

static void run_task(word index) __attribute__((noreturn));

static void fork_children(word index)
{
    struct task *task = at(plan()->tasks.at);
    int dead = 0;
    for (word i = 0; i < plan()->tasks.count; i++, task++) {
        if (task->maker != index)
            continue;
        int pid = (int)task->pid;
        /* The signal at its end is that of its maker, if that is not its parent. */
        struct clone how = { task->sibling ? CLONE_PARENT : 0, 0, 0, 0, task->sibling ? 0 : SIGCHLD, 0, 0, 0, (word)&pid, 1, 0 };
        if (must(call2(SYS_clone3, &how, sizeof how), AT_FORK, task->pid) == 0)
            run_task(i);
        if (task->state == TASK_DEAD) {
            must(call5(SYS_waitid, P_PID, task->pid, 0, WEXITED | WNOWAIT, 0), AT_FORK, task->pid);
            dead = 1;
        }
    }
    /* The parent has long been told of them. */
    word child = 1UL << (SIGCHLD - 1), none[2] = { 0, 0 };
    while (dead && call4(SYS_rt_sigtimedwait, &child, 0, none, sizeof child) > 0)
        ;
}

/* Its leader may be on its way. */
static void enter_group(word group)
{
    for (word tries = 0;; tries++) {
        long done = call2(SYS_setpgid, 0, group);
        if (done != -EPERM || tries > 100000) {
            must(done, AT_GROUP, group);
            return;
        }
        call1(SYS_sched_yield, 0);
    }
}

/* A zombie, once more. */
__attribute__((noreturn)) static void die(word status)
{
    word signal = status & 0x7f;
    if (signal) {
        word none[2] = { 0, 0 }, action[4] = { 0, 0, 0, 0 }, mask = 1UL << (signal - 1);
        call4(SYS_prlimit64, 0, RLIMIT_CORE, none, 0);
        call4(SYS_rt_sigaction, signal, action, 0, 8);
        call2(SYS_kill, ((struct task *)at(plan()->tasks.at) + task_now)->pid, signal);
        call4(SYS_rt_sigprocmask, SIG_UNBLOCK, &mask, 0, sizeof mask);
    }
    for (;;)
        call1(SYS_exit_group, status >> 8 & 0xff);
}

/* --- Every process --- */

static void place_descriptors(struct task *task)
{
    must(call3(SYS_close_range, 0, plan()->base - 2, 0), AT_DESCRIPTOR, 0);
    struct descriptor *descriptor = at(task->descriptors.at);
    for (word i = 0; i < task->descriptors.count; i++, descriptor++)
        must(call3(SYS_dup3, ours(descriptor->ours), descriptor->number, descriptor->flags & 1 ? O_CLOEXEC : 0), AT_DESCRIPTOR,
             descriptor->number);
    must(call1(SYS_fchdir, ours(task->directory)), AT_DIRECTORY, 0);
    call1(SYS_umask, task->umask);
}

static void map_memory(struct task *task)
{
    struct mapping *mappings = at(task->mappings.at);
    for (word i = 0; i < task->mappings.count; i++) {
        struct mapping *m = mappings + i;
        word protection = m->written ? m->protection | PROT_WRITE : m->protection, length = m->end - m->start;
        if (m->kind == MAPPING_SHARED) {
            struct shared *shared = (struct shared *)at(plan()->shared.at) + m->ours;
            /* An old size of 0 makes another mapping of the same shared memory. */
            must(call5(SYS_mremap, shared->prefilled + m->offset, 0, length, MREMAP_MAYMOVE | MREMAP_FIXED, m->start), AT_MAP,
                 m->start);
            if (m->protection != (PROT_READ | PROT_WRITE))
                must(call3(SYS_mprotect, m->start, length, m->protection), AT_PROTECT, m->start);
            continue;
        }
        int fd = m->flags & MAP_ANONYMOUS ? -1 : ours(m->ours);
        must(call6(SYS_mmap, m->start, length, protection, m->flags | MAP_FIXED, fd, m->offset), AT_MAP, m->start);
    }
    read_pages(task->pages);
    for (word i = 0; i < task->mappings.count; i++) {
        struct mapping *m = mappings + i;
        if (m->kind == MAPPING_PLAIN && m->written && !(m->protection & PROT_WRITE))
            must(call3(SYS_mprotect, m->start, m->end - m->start, m->protection), AT_PROTECT, m->start);
        for (word advice = 0; m->advice >> advice; advice++)
            if (m->advice >> advice & 1)
                must(call3(SYS_madvise, m->start, m->end - m->start, advice), AT_PROTECT, m->start);
    }
    struct piece *piece = at(task->vdso.at);
    word from = VDSO;
    for (word i = 0; i < task->vdso.count; i++, piece++) {
        must(call5(SYS_mremap, from, piece->size, piece->size, MREMAP_MAYMOVE | MREMAP_FIXED, piece->target), AT_VDSO, i);
        from += piece->size;
    }
}

enum { PR_SET_PDEATHSIG = 1, PR_SET_DUMPABLE = 4, PR_SET_NAME = 15, PR_CAPBSET_DROP = 24, PR_SET_SECUREBITS = 28, PR_SET_MM = 35,
       PR_SET_MM_MAP = 14, PR_SET_CHILD_SUBREAPER = 36, PR_SET_NO_NEW_PRIVS = 38, PR_SET_THP_DISABLE = 41, PR_CAP_AMBIENT = 47,
       PR_CAP_AMBIENT_RAISE = 2, PR_TIMER_CREATE_RESTORE_IDS = 77 };

static void set_mm(struct task *task)
{
    struct {
        word fields[11];
        word *auxv;
        u32 auxv_size, executable;
    } map;
    copy(map.fields, task->mm, sizeof map.fields);
    map.auxv = at(task->auxv.at);
    map.auxv_size = (u32)task->auxv.count;
    map.executable = (u32)ours(task->executable);
    must(call5(SYS_prctl, PR_SET_MM, PR_SET_MM_MAP, &map, sizeof map, 0), AT_MM, 0);
    if (task->thp_disabled)
        must(call5(SYS_prctl, PR_SET_THP_DISABLE, 1, 0, 0, 0), AT_MM, 1);
}

static void set_signals(struct task *task)
{
    struct signal *signal = at(task->signals.at);
    for (word i = 0; i < task->signals.count; i++, signal++) {
        word action[4] = { signal->handler, signal->flags, signal->restorer, signal->mask };
        must(call4(SYS_rt_sigaction, signal->number, action, 0, 8), AT_SIGNAL, signal->number);
    }
}

static void set_limits(struct task *task)
{
    struct limit *limit = at(task->limits.at);
    for (word i = 0; i < task->limits.count; i++, limit++) {
        word value[2] = { limit->soft, limit->hard };
        must(call4(SYS_prlimit64, 0, limit->resource, value, 0), AT_LIMIT, limit->resource);
    }
}

static word now(word clock)
{
    word time[2] = { 0, 0 };
    call2(SYS_clock_gettime, clock, time);
    return time[0] * 1000000000UL + time[1];
}

/* A periodic one that has come due keeps its beat: its signal is sent now, the next is one of the old beat. */
static void set_intervals(struct task *task)
{
    for (word which = 0; which < 3; which++) {
        word left = task->interval[2 * which], every = task->interval[2 * which + 1];
        if (!left)
            continue;
        if (which == 0) {
            word clock = now(1);
            if (left > clock) {
                left -= clock;
            } else {
                word over = clock - left;
                left = every ? every - over % every : 1000;
                if (every)
                    call2(SYS_kill, task->pid, SIGALRM);
            }
        }
        left = (left + 999) / 1000;
        word value[4] = { every / 1000000000UL, every / 1000 % 1000000, left / 1000000, left % 1000000 };
        must(call3(SYS_setitimer, which, value, 0), AT_TIMER, which);
    }
}

static void set_timers(struct task *task)
{
    struct timer *timer = at(task->timers.at);
    if (task->timers.count)
        must(call5(SYS_prctl, PR_TIMER_CREATE_RESTORE_IDS, 1, 0, 0, 0), AT_TIMER, 100);
    for (word i = 0; i < task->timers.count; i++, timer++) {
        struct {
            word value;
            int signal, notify;
            int thread, rest[11];
        } event = { timer->value, (int)timer->signal, (int)timer->notify, (int)timer->thread, { 0 } };
        int id = (int)timer->id;
        must(call3(SYS_timer_create, timer->clock, &event, &id), AT_TIMER, timer->id);
        if (!timer->due)
            continue;
        /* Absolute: one that is over fires at once, with its overruns, and keeps its beat. */
        word due = timer->absolute ? timer->due - now(1) + now(timer->clock) : timer->due;
        word value[4] = { timer->every / 1000000000UL, timer->every % 1000000000UL, due / 1000000000UL, due % 1000000000UL };
        must(call4(SYS_timer_settime, id, timer->absolute ? 1 : 0, value, 0), AT_TIMER, timer->id);
    }
    if (task->timers.count)
        call5(SYS_prctl, PR_TIMER_CREATE_RESTORE_IDS, 0, 0, 0, 0);
}

static void set_locks(struct task *task)
{
    struct lock *lock = at(task->locks.at);
    for (word i = 0; i < task->locks.count; i++, lock++) {
        long done;
        if (lock->kind == 2) {
            done = call2(SYS_flock, lock->number, lock->type == 0 ? 1 | 4 : 2 | 4);
        } else {
            struct {
                short type, whence;
                int pad;
                word start, length;
                int pid, pad2;
            } what = { (short)lock->type, 0, 0, lock->start, lock->length, 0, 0 };
            done = call3(SYS_fcntl, lock->number, lock->kind == 1 ? 6 : 37, &what);
        }
        must(done, AT_LOCK, lock->number);
    }
}

static void set_watches(struct task *task)
{
    struct watch *watch = at(task->watches.at);
    for (word i = 0; i < task->watches.count; i++, watch++) {
        struct {
            u32 events;
            word data;
        } __attribute__((packed)) event = { (u32)watch->events, watch->data };
        call4(SYS_epoll_ctl, watch->set, 2, watch->number, 0);
        must(call4(SYS_epoll_ctl, watch->set, 1, watch->number, &event), AT_WATCH, watch->number);
    }
}

/* Signals that wait. All are blocked here, so they go on waiting. */
static void queue(struct span list, word pid, word thread)
{
    char *info = at(list.at);
    for (word i = 0; i < list.count; i++, info += INFO_SIZE) {
        int signal = *(int *)info;
        must(thread ? call4(SYS_rt_tgsigqueueinfo, pid, thread, signal, info) : call3(SYS_rt_sigqueueinfo, pid, signal, info),
             AT_SIGNAL, 1000 + (word)signal);
    }
}

/* --- Every thread --- */

static void set_thread(struct thread *thread)
{
    call1(SYS_set_tid_address, thread->clear_tid);
    if (thread->robust)
        must(call2(SYS_set_robust_list, thread->robust, thread->robust_size), AT_SETTING, 1);
    if (thread->stack_size) {
        word stack[3] = { thread->stack, thread->stack_flags & ~1UL, thread->stack_size };
        must(call2(SYS_sigaltstack, stack, 0), AT_SETTING, 2);
    }
    must(call2(SYS_prctl, PR_SET_NAME, at(thread->comm)), AT_SETTING, 3);
    if (thread->policy) {
        int priority = (int)thread->priority;
        must(call3(SYS_sched_setscheduler, 0, thread->policy, &priority), AT_SETTING, 4);
    }
    if (thread->nice)
        must(call3(SYS_setpriority, 0, 0, thread->nice), AT_SETTING, 5);
    queue(thread->pending, ((struct task *)at(plan()->tasks.at) + task_now)->pid, thread->id);
    if (thread->rseq)
        must(call4(SYS_rseq, thread->rseq, thread->rseq_size, 0, thread->rseq_signature), AT_SETTING, 6);
}

static void set_ids(struct credentials *c)
{
    /* SECBIT_NO_SETUID_FIXUP: capabilities stay when the user changes. */
    must(call2(SYS_prctl, PR_SET_SECUREBITS, 1 << 2), AT_CREDENTIALS, 1);
    for (word bit = 0; bit < 64; bit++)
        if (!(c->bounding >> bit & 1) && call2(SYS_prctl, PR_CAPBSET_DROP, bit) == -EINVAL)
            break;
    must(call2(SYS_setgroups, c->groups.count, at(c->groups.at)), AT_CREDENTIALS, 2);
    must(call3(SYS_setresgid, c->gid, c->egid, c->sgid), AT_CREDENTIALS, 3);
    must(call3(SYS_setresuid, c->uid, c->euid, c->suid), AT_CREDENTIALS, 4);
    call1(SYS_setfsgid, c->fsgid);
    call1(SYS_setfsuid, c->fsuid);
    must(call2(SYS_prctl, PR_SET_SECUREBITS, c->securebits), AT_CREDENTIALS, 5);
    if (c->no_new_privs)
        must(call5(SYS_prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), AT_CREDENTIALS, 6);
}

static void set_capabilities(struct thread *thread)
{
    struct credentials *c = at(thread->credentials);
    struct {
        u32 version;
        int pid;
    } head = { 0x20080522, 0 };
    u32 sets[6] = { (u32)c->effective, (u32)c->permitted, (u32)c->inheritable,
                    (u32)(c->effective >> 32), (u32)(c->permitted >> 32), (u32)(c->inheritable >> 32) };
    must(call2(SYS_capset, &head, sets), AT_CREDENTIALS, 7);
    for (word bit = 0; c->ambient >> bit; bit++)
        if (c->ambient >> bit & 1)
            must(call5(SYS_prctl, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, bit, 0, 0), AT_CREDENTIALS, 8);
    /* A change of credentials clears it. */
    if (thread->death_signal)
        must(call2(SYS_prctl, PR_SET_PDEATHSIG, thread->death_signal), AT_SETTING, 7);
}

static void wait_until(u32 *counter, u32 value)
{
    for (;;) {
        u32 seen = __atomic_load_n(counter, __ATOMIC_ACQUIRE);
        if (seen >= value)
            return;
        call4(SYS_futex, counter, 0, seen, 0);
    }
}

__attribute__((noreturn)) static void stand(void)
{
    for (;;)
        call4(SYS_futex, &never, 0, 0, 0);
}

__attribute__((noreturn, used)) static void run_thread(struct thread *thread)
{
    set_thread(thread);
    set_ids(at(((struct thread *)thread)->credentials));
    set_capabilities(thread);
    __atomic_add_fetch(&threads_ready, 1, __ATOMIC_RELEASE);
    call3(SYS_futex, &threads_ready, 1, 1);
    stand();
}

/* clone3(2) onto a stack of the new thread's own, where `run_thread(thread)` begins. */
static long start_thread(struct clone *how, struct thread *thread)
{
    long result;
    register word argument __asm__("r12") = (word)thread;
    register word run __asm__("r13") = (word)run_thread;
    __asm__ volatile("syscall\n\t"
                     "test %%rax, %%rax\n\t"
                     "jnz 1f\n\t"
                     "xor %%ebp, %%ebp\n\t"
                     "mov %%r12, %%rdi\n\t"
                     "call *%%r13\n\t"
                     "hlt\n"
                     "1:"
                     : "=a"(result)
                     : "a"((long)SYS_clone3), "D"(how), "S"(sizeof *how), "r"(argument), "r"(run)
                     : "rcx", "r11", "memory");
    return result;
}

static void start_threads(struct task *task)
{
    if (task->threads.count < 2)
        return;
    word size = (task->threads.count - 1) * STACK_SIZE;
    must(call6(SYS_mmap, STACKS, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0), AT_THREAD, 0);
    struct thread *thread = at(task->threads.at);
    for (word i = 1; i < task->threads.count; i++) {
        int id = (int)(++thread)->id;
        struct clone how = { CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM, 0, 0, 0, 0,
                             STACKS + (i - 1) * STACK_SIZE, STACK_SIZE, 0, (word)&id, 1, 0 };
        must(start_thread(&how, thread), AT_THREAD, thread->id);
        struct said said = { WORD_THREAD, task_now, thread->id, 0, 0 };
        tell(&said, thread->id);
    }
    wait_until(&threads_ready, (u32)task->threads.count - 1);
}

/* The whole process at once: every thread is there, and none has a filter yet. */
static void set_filters(struct task *task)
{
    struct filter *filter = at(task->filters.at);
    for (word i = 0; i < task->filters.count; i++, filter++) {
        struct {
            unsigned short length;
            void *code;
        } program = { (unsigned short)filter->count, at(filter->at) };
        long done = call3(SYS_seccomp, 1, filter->flags | (task->threads.count > 1 ? 1 : 0), &program);
        if (done)
            fail(AT_FILTER, done < 0 ? done : -EAGAIN, (word)done);
    }
}

static void run_task(word index)
{
    struct task *task = (struct task *)at(plan()->tasks.at) + index;
    struct thread *leader = at(task->threads.at);
    task_now = index;
    if (task->leads_session)
        must(call1(SYS_setsid, 0), AT_GROUP, 0);
    else if (task->group)
        enter_group(task->group);
    if (task->state == TASK_DEAD) {
        call2(SYS_prctl, PR_SET_NAME, at(leader->comm));
        die(task->status);
    }
    fork_children(index);
    if (task->state == TASK_GHOST)
        die(0);
    struct said said = { WORD_TASK, index, task->pid, 0, 0 };
    tell(&said, task->pid);
    map_memory(task);
    set_mm(task);
    place_descriptors(task);
    /* Before record locks are set: to close any descriptor of a file gives up the process's locks on it. */
    call3(SYS_close_range, plan()->base, ~0U, 0);
    set_locks(task);
    set_watches(task);
    set_signals(task);
    queue(task->pending, task->pid, 0);
    set_limits(task);
    if (task->personality)
        must(call1(SYS_personality, task->personality), AT_SETTING, 8);
    start_threads(task);
    set_intervals(task);
    set_timers(task);
    set_thread(leader);
    set_ids(at(leader->credentials));
    set_filters(task);
    set_capabilities(leader);
    for (word bit = 0; task->membarrier >> bit; bit++)
        if (task->membarrier >> bit & 1)
            must(call3(SYS_membarrier, 1UL << bit, 0, 0), AT_SETTING, 11);
    if (task->subreaper)
        must(call2(SYS_prctl, PR_SET_CHILD_SUBREAPER, 1), AT_SETTING, 9);
    must(call2(SYS_prctl, PR_SET_DUMPABLE, task->dumpable), AT_SETTING, 10);
    call1(SYS_close, socket_at);
    stand();
}

/* Pid 1 is kip-init: no memory of it is kept, only its descriptors and credentials, and the pid it waits for. */
__attribute__((noreturn)) static void become_init(word index)
{
    struct task *task = (struct task *)at(plan()->tasks.at) + index;
    struct thread *leader = at(task->threads.at);
    task_now = index;
    place_descriptors(task);
    set_limits(task);
    set_ids(at(leader->credentials));
    set_filters(task);
    set_capabilities(leader);
    char *arguments[] = { "kip-init", "--resume", at(plan()->init_arg), 0 };
    char *environment[] = { 0 };
    fail(AT_EXEC, call3(SYS_execve, at(plan()->init), arguments, environment), 0);
}

/* --- The beginning --- */

extern char __executable_start[], _end[];

/* From file to anonymous memory, at the same addresses and with the same contents. */
static void move_to_memory(void)
{
    word start = (word)__executable_start & -PAGE, size = ((word)_end - start + PAGE - 1) & -PAGE;
    must(call6(SYS_mmap, COPY, size, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0), AT_START,
         1);
    copy((void *)COPY, (void *)start, size);
    must(call5(SYS_mremap, COPY, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, start), AT_START, 2);
}

__attribute__((noreturn, used)) static void run(word vdso)
{
    word every = ~0UL;
    call4(SYS_rt_sigprocmask, SIG_SETMASK, &every, 0, sizeof every);
    receive();
    move_to_memory();
    struct piece *piece = at(plan()->vdso.at);
    word to = VDSO;
    for (word i = 0; i < plan()->vdso.count; i++, piece++) {
        must(call5(SYS_mremap, vdso + piece->offset, piece->size, piece->size, MREMAP_MAYMOVE | MREMAP_FIXED, to), AT_VDSO,
             100 + i);
        to += piece->size;
    }
    must(call2(SYS_munmap, PAGE, AREA - PAGE), AT_START, 3);
    must(call2(SYS_munmap, AREA_END, USER_END - AREA_END), AT_START, 4);
    open_files();
    make_shared();
    fork_children(0);
    become_init(0);
}

/* The kernel's stack lies where the program's memory goes. */
__attribute__((noreturn, used)) static void begin(word *stack)
{
    word count = stack[0];
    word *words = stack + 1 + count + 1;
    while (*words++)
        ;
    word vdso = 0;
    for (; words[0]; words += 2)
        if (words[0] == AT_SYSINFO_EHDR)
            vdso = words[1];
    must(call6(SYS_mmap, MAIN_STACK, MAIN_STACK_SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0),
         AT_START, 0);
    register word argument __asm__("rdi") = vdso;
    __asm__ volatile("mov %0, %%rsp\n\t"
                     "xor %%ebp, %%ebp\n\t"
                     "call run\n\t"
                     "hlt"
                     :
                     : "r"(MAIN_STACK + MAIN_STACK_SIZE), "r"(argument)
                     : "memory");
    __builtin_unreachable();
}

__asm__(".globl _start\n"
        "_start:\n\t"
        "xor %ebp, %ebp\n\t"
        "mov %rsp, %rdi\n\t"
        "and $-16, %rsp\n\t"
        "call begin\n\t"
        "hlt\n");
