/* Rebuilds a process tree from a plan, as pid 1 of a new sandbox, and then becomes kip-init again.
 *
 * The launcher executes it with every capability of the sandbox's user namespace and one descriptor, 3: a SEQPACKET
 * socket to the daemon. From there come the plan and every descriptor that outlived the processes (struct packet). Pid 1
 * opens the files of the whole tree, makes what memory is shared, forks its children and executes kip-init, which waits
 * for the program as before. Each child forks its own, those that have much of its memory mapped
 * once it has mapped that, then puts memory, descriptors, signals, limits, threads and
 * credentials in place, tells its pids (struct word), closes the socket and waits: so the socket's end means that
 * every process is ready, or dead. The daemon, which traces the threads, then gives them their registers and unmaps our area.
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

#include "kernel.h"
#include "plan.h"

static int socket_at = FIRST_SOCKET;
static word task_now = ~0UL;
static word received;          /* descriptors */
static word taken_within;      /* Nanoseconds: so long after its first instruction the program has taken that */
static word waited_since;      /* CLOCK_MONOTONIC: since then something from the network waits for the program; 0: nothing */
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

static void report(struct said *said, word pid)
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
    report(&said, 0);
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

/* Nanoseconds. */
static word now(word clock)
{
    word time[2] = { 0, 0 };
    call2(SYS_clock_gettime, clock, time);
    return time[0] * 1000000000UL + time[1];
}

/* --- Pid 1 --- */

/* Reads every packet; descriptor i gets the number base + i. */
static void receive(void)
{
    static char control[16 + MOST_DESCRIPTORS * sizeof(int) + 16] __attribute__((aligned(8)));
    struct packet packet = { 0, 0, 0, 0, 1, 0, 0 };
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
            waited_since = packet.waited ? now(1) - packet.waited : 0;
            taken_within = packet.taken_within;
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

#include "system_v.h"

#include "shared_memory.h"
#include "children.h"

/* Its leader may be on its way. */
static void enter_group(word group)
{
    for (word until = now(1) + 10000000000UL;;) {
        long done = call2(SYS_setpgid, 0, group);
        if (done != -EPERM || now(1) > until) {
            must(done, AT_GROUP, group);
            return;
        }
        call1(SYS_sched_yield, 0);
    }
}

/* Its leader has ended: a child leads it until this one is in it. */
static void lend_group(word group)
{
    int pid = (int)group;
    struct clone how = { 0, 0, 0, 0, 0, 0, 0, 0, (word)&pid, 1, 0 };
    if (must(call2(SYS_clone3, &how, sizeof how), AT_GROUP, group) == 0) {
        must(call2(SYS_setpgid, 0, 0), AT_GROUP, group);
        for (;;)
            call1(SYS_exit_group, 0);
    }
    /* Until its parent has waited for it, the child is in its group. */
    must(call5(SYS_waitid, P_PID, group, 0, WEXITED | WNOWAIT | WALL, 0), AT_GROUP, group);
    must(call2(SYS_setpgid, 0, group), AT_GROUP, group);
    must(call5(SYS_waitid, P_PID, group, 0, WEXITED | WALL, 0), AT_GROUP, group);
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
    if (~task->root) {
        must(call1(SYS_fchdir, ours(task->root)), AT_ROOT, 0);
        must(call1(SYS_chroot, "."), AT_ROOT, 1);
    }
    must(call1(SYS_fchdir, ours(task->directory)), AT_DIRECTORY, 0);
    call1(SYS_umask, task->umask);
}

#include "rings.h"
#include "memory.h"
#include "settings.h"
#include "terminals.h"

/* Behind all that was received and opened, where place_of_processes finds them. Before any page is there that would be copied. */
static void open_of_processes(struct task *task)
{
    struct of_process *of = at(task->of_processes.at);
    for (word i = 0; i < task->of_processes.count; i++, of++) {
        int fd = -1, process = (int)of->process;
        if (of->gone) {
            struct clone how = { CLONE_PIDFD, (word)&fd, 0, 0, 0, 0, 0, 0, (word)&process, 1, 0 };
            if (must(call2(SYS_clone3, &how, sizeof how), AT_PIDFD, of->number) == 0)
                for (;;)
                    call1(SYS_exit_group, 0);
            must(call5(SYS_waitid, P_PID, of->process, 0, WEXITED | WALL, 0), AT_PIDFD, of->number);
        }
        /* It may be on its way. */
        for (word until = now(1) + 10000000000UL; fd < 0;) {
            if (of->path)
                fd = (int)call4(SYS_openat, AT_FDCWD, at(of->path), of->flags | O_CLOEXEC, 0);
            else
                fd = (int)call2(SYS_pidfd_open, of->process, 0);
            if ((fd != -ESRCH && fd != -ENOENT) || now(1) > until)
                must(fd, AT_PIDFD, of->number);
            else
                call1(SYS_sched_yield, 0);
        }
        if (of->path && of->position)
            must(call3(SYS_lseek, fd, of->position, 0), AT_PIDFD, of->number);
        if (!of->path && of->flags)
            must(call3(SYS_fcntl, fd, F_SETFL, of->flags), AT_PIDFD, of->number);
        must(call3(SYS_dup3, fd, ours(received + plan()->files.count + i), O_CLOEXEC), AT_PIDFD, of->number);
        call1(SYS_close, fd);
    }
}

static void place_of_processes(struct task *task)
{
    struct of_process *of = at(task->of_processes.at);
    for (word i = 0; i < task->of_processes.count; i++, of++)
        must(call3(SYS_dup3, ours(received + plan()->files.count + i), of->number, of->descriptor_flags & 1 ? O_CLOEXEC : 0),
             AT_DESCRIPTOR, of->number);
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
        report(&said, thread->id);
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
    if (!task->inherits)
        unmap_all();
    if (task->leads_session) {
        fork_children(index, FORK_EARLY);
        must(call1(SYS_setsid, 0), AT_GROUP, 0);
        take_terminal(index);
    }
    fork_children(index, FORK_OTHERS);
    make_mappings(task, MADE_BEFORE);
    fork_children(index, FORK_HEIRS);
    if (task->lends)
        lend_group(task->group);
    else if (task->group)
        enter_group(task->group);
    if (task->state == TASK_DEAD) {
        call2(SYS_prctl, PR_SET_NAME, at(leader->comm));
        die(task->status);
    }
    if (task->state == TASK_GHOST)
        die(0);
    struct said said = { WORD_TASK, index, task->pid, 0, 0 };
    report(&said, task->pid);
    open_of_processes(task);
    struct setting *setting = at(task->settings.at);
    for (word i = 0; i < task->settings.count; i++, setting++)
        write_setting(setting, AT_SETTING);
    map_memory(task);
    set_mm(task);
    set_foreground(index);
    place_descriptors(task);
    place_of_processes(task);
    /* Before record locks are set: to close any descriptor of a file gives up the process's locks on it. */
    call3(SYS_close_range, plan()->base, ~0U, 0);
    set_locks(task);
    set_watches(task);
    await_stopped(index);
    set_signals(task);
    queue(task->pending, task->pid, 0);
    if (task->leads_session)
        hang_up(task->pid);
    if (task->personality)
        must(call1(SYS_personality, task->personality), AT_SETTING, 8);
    start_threads(task);
    set_intervals(task);
    set_timers(task);
    /* After all that takes memory and processes of our own. */
    set_limits(task);
    set_thread(leader);
    struct credentials *credentials = at(leader->credentials);
    set_ids(credentials);
    /* Without no_new_privs it takes a capability; with it the filter may refuse what is below. */
    if (!credentials->no_new_privs)
        set_filters(task);
    set_capabilities(leader);
    for (word bit = 0; task->membarrier >> bit; bit++)
        if (task->membarrier >> bit & 1)
            must(call3(SYS_membarrier, 1UL << bit, 0, 0), AT_SETTING, 11);
    if (task->subreaper)
        must(call2(SYS_prctl, PR_SET_CHILD_SUBREAPER, 1), AT_SETTING, 9);
    must(call2(SYS_prctl, PR_SET_DUMPABLE, task->dumpable), AT_SETTING, 10);
    if (credentials->no_new_privs)
        set_filters(task);
    call1(SYS_close, socket_at);
    if (task->state == TASK_STOPPED)
        call2(SYS_kill, task->pid, SIGSTOP);
    stand();
}

/* Pid 1 is kip-init: no memory of it is kept, only its descriptors and credentials, and the pid it waits for. */
__attribute__((noreturn)) static void become_init(word index)
{
    struct task *task = (struct task *)at(plan()->tasks.at) + index;
    struct thread *leader = at(task->threads.at);
    task_now = index;
    place_descriptors(task);
    /* Its status pipe, which it marks close-on-exec itself, has to get there first. */
    must(call3(SYS_fcntl, STATUS_FD, F_SETFD, 0), AT_DESCRIPTOR, STATUS_FD);
    set_limits(task);
    struct credentials *credentials = at(leader->credentials);
    set_ids(credentials);
    if (!credentials->no_new_privs)
        set_filters(task);
    set_capabilities(leader);
    if (credentials->no_new_privs)
        set_filters(task);
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
    unmap_all();
    open_files();
    make_system_v();
    make_shared();
    fork_children(0, FORK_OTHERS);
    fork_children(0, FORK_HEIRS);
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
