/* Pid 1 of a sandbox, or the parent of a client's session in it: starts the program, tells how that went, reaps whatever is orphaned, ends with the program.
 *
 *   kip-init WORKDIR IDS COMMAND [ARGUMENT]...  (an empty WORKDIR is "/"; the environment is the program's; IDS are
 *                                                UID,GID[,GROUP]... or nothing: then it runs as root; after a slash
 *                                                may come the capabilities that it can have, the bits as a number)
 *   kip-look WORKDIR IDS COMMAND [ARGUMENT]...  (likewise, but the program is only exec'd and killed before its first instruction:
 *                                                init says how that went and exits)
 *   kip-init --resume PID                       (the program is there, as a child of the process that becomes init)
 *
 * Descriptor 3 is the write end of the status pipe. Records of 8 bytes go there, struct record below:
 *   'R' pid      the program has been exec'd; its pid inside. Not after --resume
 *   'E' errno    it could not be, or init has no such child; step tells what failed; init then exits with 127
 *   'X' status   the program has ended, as wait4(2) tells it; init then exits likewise and the kernel kills the rest
 *
 * It is checkpointed with every proc, so it is freestanding and owns no more than a page of text and a stack, and
 * everything it does after the start is to wait. It never handles a signal: as pid 1 it gets none it has no handler for.
 */

#if !defined(__x86_64__)
#error "kip-init knows x86_64 only: add the system call numbers and the three pieces of assembly of your machine"
#endif

typedef unsigned long word;

enum { SYS_write = 1, SYS_close = 3, SYS_rt_sigaction = 13, SYS_rt_sigprocmask = 14, SYS_ioctl = 16, SYS_madvise = 28, SYS_clone = 56,
       SYS_execve = 59, SYS_exit = 60, SYS_wait4 = 61, SYS_fcntl = 72, SYS_chdir = 80, SYS_ptrace = 101, SYS_setsid = 112,
       SYS_setgroups = 116, SYS_setresuid = 117, SYS_setresgid = 119, SYS_prctl = 157, SYS_exit_group = 231 };
enum { ENOENT = 2, EINTR = 4, ECHILD = 10, EACCES = 13, ENOTDIR = 20, EINVAL = 22, ENAMETOOLONG = 36 };
enum { CLONE_VM = 0x100, CLONE_VFORK = 0x4000, SIGCHLD = 17, SIG_SETMASK = 2, F_SETFD = 2, FD_CLOEXEC = 1,
       MADV_DONTNEED = 4, STATUS_FD = 3, PAGE = 4096, PATH_MAX = 4096, GROUPS = 64, PR_SET_DUMPABLE = 4, PR_CAPBSET_DROP = 24,
       PTRACE_TRACEME = 0, TIOCSCTTY = 0x540e };

struct record {
    char type;
    char step; /* of an 'E': 1 the working directory, 2 the program, 3 the process itself, 4 its ids */
    char unused[2];
    int value;
};

struct start {
    char *workdir;
    char *ids;
    char **argv;
    char **envp;
    int exec_only; /* the program is not to run */
    int error; /* written by the child, which shares our memory, before it exits */
    int step;
};

static inline long call(long number, word a, word b, word c, word d)
{
    long result;
    register word r10 __asm__("r10") = d;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10)
                     : "rcx", "r11", "memory");
    return result;
}

/* vfork(2) onto another stack: the child calls `run(argument)`, which must not return, and we go on once it has exec'd
 * or exited. */
static inline long spawn(void (*run)(struct start *), struct start *argument, char *stack_end)
{
    long result;
    register word r10 __asm__("r10") = 0;
    register word r8 __asm__("r8") = 0;
    register word run_in __asm__("r12") = (word)run;
    register word argument_in __asm__("r13") = (word)argument;
    __asm__ volatile("syscall\n\t"
                     "test %%rax, %%rax\n\t"
                     "jnz 1f\n\t"
                     "xor %%ebp, %%ebp\n\t"
                     "mov %%r13, %%rdi\n\t"
                     "call *%%r12\n\t"
                     "hlt\n"
                     "1:"
                     : "=a"(result)
                     : "a"((long)SYS_clone), "D"((word)(CLONE_VM | CLONE_VFORK | SIGCHLD)), "S"(stack_end), "d"(0UL),
                       "r"(r10), "r"(r8), "r"(run_in), "r"(argument_in)
                     : "rcx", "r11", "memory");
    return result;
}

static void report(char type, char step, int value)
{
    struct record record = { type, step, { 0, 0 }, value };
    while (call(SYS_write, STATUS_FD, (word)&record, sizeof record, 0) == -EINTR)
        ;
}

static char *path_of(char **envp)
{
    for (; *envp; envp++) {
        char *e = *envp;
        if (e[0] == 'P' && e[1] == 'A' && e[2] == 'T' && e[3] == 'H' && e[4] == '=')
            return e + 5;
    }
    return "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
}

/* execvp(3) without its shell: the errno of the best attempt. */
static int exec_by_path(char **argv, char **envp)
{
    char buffer[PATH_MAX];
    char *name = argv[0];
    int denied = 0;
    word length = 0;
    for (; name[length]; length++)
        if (name[length] == '/')
            return -call(SYS_execve, (word)name, (word)argv, (word)envp, 0);
    if (length == 0)
        return ENOENT;
    for (char *path = path_of(envp);;) {
        word at = 0;
        while (*path && *path != ':' && at < PATH_MAX - length - 2)
            buffer[at++] = *path++;
        if (*path && *path != ':')
            return ENAMETOOLONG;
        if (at == 0)
            buffer[at++] = '.';
        buffer[at++] = '/';
        for (word i = 0; i <= length; i++)
            buffer[at + i] = name[i];
        int error = -call(SYS_execve, (word)buffer, (word)argv, (word)envp, 0);
        if (error == EACCES)
            denied = 1;
        else if (error != ENOENT && error != ENOTDIR)
            return error;
        if (!*path++)
            return denied ? EACCES : ENOENT;
    }
}

/* Takes capabilities from what the program gets at its execve(2), if its ids say which it can have. */
static long limit_capabilities(char *ids)
{
    word kept = 0;
    for (; *ids != '/'; ids++)
        if (!*ids)
            return 0;
    for (ids++; *ids >= '0' && *ids <= '9'; ids++)
        kept = kept * 10 + *ids - '0';
    for (word bit = 0; bit < 64; bit++) {
        long error = kept >> bit & 1 ? 0 : call(SYS_prctl, PR_CAPBSET_DROP, bit, 0, 0);
        /* The kernel knows no more. */
        if (error == -EINVAL)
            break;
        if (error)
            return error;
    }
    return 0;
}

/* The ids of the program, root's if none are named. Not called for pid 1 itself. */
static long take_ids(char *ids)
{
    unsigned numbers[2 + GROUPS];
    int count = 0;
    if (!*ids || *ids == '/')
        return 0;
    for (char *c = ids;; c++) {
        unsigned number = 0;
        for (; *c >= '0' && *c <= '9'; c++)
            number = number * 10 + *c - '0';
        if (count < 2 + GROUPS)
            numbers[count++] = number;
        if (!*c || *c == '/')
            break;
    }
    long error = call(SYS_setgroups, count - 2, (word)(numbers + 2), 0, 0);
    if (!error)
        error = call(SYS_setresgid, numbers[1], numbers[1], numbers[1], 0);
    if (!error)
        error = call(SYS_setresuid, numbers[0], numbers[0], numbers[0], 0);
    return error;
}

static void child(struct start *start)
{
    call(SYS_setsid, 0, 0, 0, 0);
    /* Where standard input is a terminal it is the session's. */
    call(SYS_ioctl, 0, TIOCSCTTY, 0, 0);
    long moved = call(SYS_chdir, (word)(*start->workdir ? start->workdir : "/"), 0, 0, 0);
    /* Before it takes the ids: of another user it could not. */
    long taken = moved < 0 ? 0 : limit_capabilities(start->ids);
    if (moved >= 0 && !taken)
        taken = take_ids(start->ids);
    /* A traced child stops at the end of its execve(2), with nothing of the program done. */
    long traced = start->exec_only ? call(SYS_ptrace, PTRACE_TRACEME, 0, 0, 0) : 0;
    if (moved < 0) {
        start->error = -moved;
        start->step = 1;
    } else if (taken < 0) {
        start->error = -taken;
        start->step = 4;
    } else if (traced < 0) {
        start->error = -traced;
        start->step = 3;
    } else {
        start->error = exec_by_path(start->argv, start->envp);
        start->step = 2;
    }
    call(SYS_exit, 127, 0, 0, 0);
}

__attribute__((noreturn)) static void end(int code)
{
    for (;;)
        call(SYS_exit_group, code, 0, 0, 0);
}

/* In a function of its own, so that the stack it needed can be given back. */
__attribute__((noinline)) static int start_program(struct start *start)
{
    char stack[4 * PAGE] __attribute__((aligned(16)));
    long pid = spawn(child, start, stack + sizeof stack);
    /* The child took other ids while it shared our memory, which then no process could look at or checkpoint. */
    call(SYS_prctl, PR_SET_DUMPABLE, 1, 0, 0);
    if (pid < 0) {
        start->error = -pid;
        start->step = 3;
    }
    word first = ((word)stack + PAGE - 1) & -(word)PAGE, last = ((word)stack + sizeof stack) & -(word)PAGE;
    call(SYS_madvise, first, last - first, MADV_DONTNEED, 0);
    return pid;
}

/* The pid of "--resume PID", or 0 where the arguments are others: a working directory is absolute or empty. */
static long resumed(int argc, char **argv)
{
    static const char word[] = "--resume";
    long pid = 0;
    if (argc != 3)
        return 0;
    for (int i = 0; i < (int)sizeof word; i++)
        if (argv[1][i] != word[i])
            return 0;
    for (char *digit = argv[2]; *digit; digit++) {
        if (*digit < '0' || *digit > '9' || pid > 1 << 24)
            end(2);
        pid = pid * 10 + *digit - '0';
    }
    return pid;
}

__attribute__((noreturn, used)) static void begin(word *stack)
{
    int argc = stack[0];
    char **argv = (char **)(stack + 1);
    char **envp = argv + argc + 1;
    word action[4] = { 0, 0, 0, 0 }; /* SIG_DFL, no flags, no restorer, empty mask */
    word none = 0;
    for (word signal = 1; signal <= 64; signal++)
        call(SYS_rt_sigaction, signal, (word)action, 0, sizeof none);
    call(SYS_rt_sigprocmask, SIG_SETMASK, (word)&none, 0, sizeof none);
    call(SYS_fcntl, STATUS_FD, F_SETFD, FD_CLOEXEC, 0);
    if (argc < 3)
        end(2);
    long program = resumed(argc, argv);
    if (!program && argc < 4)
        end(2);
    struct start start = { argv[1], argv[2], argv + 3, envp, argv[0][4] == 'l', 0, 0 };
    if (!program) {
        program = start_program(&start);
        if (start.error) {
            report('E', start.step, start.error);
            end(127);
        }
        report('R', 0, program);
        if (start.exec_only)
            end(0);
    }
    for (;;) {
        int status = 0;
        long ended = call(SYS_wait4, -1, (word)&status, 0, 0);
        if (ended == -ECHILD) {
            report('E', 3, ECHILD);
            end(127);
        }
        if (ended != program)
            continue;
        report('X', 0, status);
        end(status & 0x7f ? 128 + (status & 0x7f) : status >> 8 & 0xff);
    }
}

__asm__(".globl _start\n"
        "_start:\n\t"
        "xor %ebp, %ebp\n\t"
        "mov %rsp, %rdi\n\t"
        "and $-16, %rsp\n\t"
        "call begin\n\t"
        "hlt\n");
