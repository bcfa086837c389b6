/* What a restorer finds, told on the control socket: one message each of "NAME\n" and what was read or done. It then waits
 * until the other end sends something or is gone, and ends; "init" makes it become kip-init for a child that exits with 9
 * when it is told to, "zombie" for one that has done so already.
 */

typedef unsigned long word;

enum { SYS_read = 0, SYS_write = 1, SYS_open = 2, SYS_close = 3, SYS_getpid = 39, SYS_fork = 57, SYS_execve = 59, SYS_exit = 60,
       SYS_wait4 = 61, SYS_getuid = 102, SYS_getgid = 104, SYS_getdents64 = 217, SYS_exit_group = 231, SYS_prlimit64 = 302,
       SYS_readlink = 89, SYS_waitid = 247, SYS_clone3 = 435 };
enum { CONTROL = 3, P_PID = 1, WEXITED = 4, WNOWAIT = 0x1000000 };

static char buffer[1 << 16];
static long counted = 5;
static void report_status(void);
static void report_mounts(void);
/* Addresses in data, which the linker has to fill in. */
static void (*const reporters[])(void) = { report_status, report_mounts };

static long call(long number, word a, word b, word c, word d)
{
    long result;
    register word r10 __asm__("r10") = d;
    register word r8 __asm__("r8") = 0;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8)
                     : "rcx", "r11", "memory");
    return result;
}

static word append(word at, const char *text)
{
    while (*text)
        buffer[at++] = *text++;
    return at;
}

static void send(word length)
{
    call(SYS_write, CONTROL, (word)buffer, length, 0);
}

static void report_number(const char *name, long value)
{
    word at = append(append(0, name), "\n");
    char digits[24];
    int n = 0;
    if (value < 0) {
        buffer[at++] = '-';
        value = -value;
    }
    do
        digits[n++] = '0' + value % 10;
    while (value /= 10);
    while (n)
        buffer[at++] = digits[--n];
    send(at);
}

static void report_file(const char *name)
{
    word at = append(append(0, name), "\n");
    long file = call(SYS_open, (word)name, 0, 0, 0);
    for (long n; (n = call(SYS_read, file, (word)buffer + at, sizeof buffer - at, 0)) > 0;)
        at += n;
    call(SYS_close, file, 0, 0, 0);
    send(at);
}

static void report_status(void)
{
    report_file("/proc/self/status");
}

static void report_mounts(void)
{
    report_file("/proc/self/mountinfo");
}

/* The names, with what they link to where they do. */
static void report_directory(const char *name)
{
    static char entries[1 << 15];
    long directory = call(SYS_open, (word)name, 0200000, 0, 0);
    word at = append(append(0, name), "\n");
    for (long n; (n = call(SYS_getdents64, directory, (word)entries, sizeof entries, 0)) > 0;)
        for (long i = 0; i < n; i += *(unsigned short *)(entries + i + 16)) {
            char path[300];
            word length = 0;
            for (const char *c = name; *c; c++)
                path[length++] = *c;
            path[length++] = '/';
            for (const char *c = entries + i + 19; *c; c++)
                path[length++] = *c;
            path[length] = 0;
            at = append(at, entries + i + 19);
            at = append(at, " ");
            long linked = call(SYS_readlink, (word)path, (word)buffer + at, 200, 0);
            at = append(at + (linked > 0 ? linked : 0), "\n");
        }
    call(SYS_close, directory, 0, 0, 0);
    send(at);
}

/* clone3(2) with a pid of our choice for the child, which ends at once. */
static void report_chosen_pid(void)
{
    int wanted = 77;
    word arguments[11] = { 0, 0, 0, 0, 17, 0, 0, 0, (word)&wanted, 1, 0 };
    long pid = call(SYS_clone3, (word)arguments, sizeof arguments, 0, 0);
    if (pid == 0)
        call(SYS_exit, 3, 0, 0, 0);
    report_number("chosen", pid);
    int status = 0;
    call(SYS_wait4, -1, (word)&status, 0, 0);
    report_number("ended", status);
}

static void become_init(int ended)
{
    char *argv[] = { "kip-init", "--resume", 0, 0 }, *envp[] = { 0 };
    long pid = call(SYS_fork, 0, 0, 0, 0);
    if (pid == 0) {
        char byte;
        if (!ended)
            call(SYS_read, CONTROL, (word)&byte, 1, 0);
        call(SYS_exit_group, 9, 0, 0, 0);
    }
    if (ended)
        call(SYS_waitid, P_PID, pid, 0, WEXITED | WNOWAIT);
    char digits[] = { '0' + pid / 10, '0' + pid % 10, 0 };
    argv[2] = digits;
    call(SYS_execve, (word) "/.kip/init", (word)argv, (word)envp, 0);
}

__attribute__((noreturn, used)) static void begin(word *stack)
{
    char **argv = (char **)(stack + 1);
    word at = append(append(0, "argv\n"), argv[0]);
    send(at);
    report_number("arguments", stack[0]);
    report_number("environment", argv[stack[0] + 1] != 0);
    report_number("pid", call(SYS_getpid, 0, 0, 0, 0));
    report_number("uid", call(SYS_getuid, 0, 0, 0, 0));
    report_number("gid", call(SYS_getgid, 0, 0, 0, 0));
    report_number("code", (word)report_chosen_pid);
    report_number("data", (word)&counted);
    for (unsigned i = 0; i < sizeof reporters / sizeof *reporters; i++)
        reporters[i]();
    report_directory("/proc");
    report_directory("/proc/self/fd");
    report_chosen_pid();
    send(append(0, "done\n"));
    char word_in[8] = { 0 };
    call(SYS_read, CONTROL, (word)word_in, sizeof word_in, 0);
    if (word_in[0] == 'i' || word_in[0] == 'z')
        become_init(word_in[0] == 'z');
    for (;;)
        call(SYS_exit_group, 0, 0, 0, 0);
}

__asm__(".globl _start\n"
        "_start:\n\t"
        "xor %ebp, %ebp\n\t"
        "mov %rsp, %rdi\n\t"
        "and $-16, %rsp\n\t"
        "call begin\n\t"
        "hlt\n");
