/* The kernel as the restorer uses it: numbers, constants, structures and the call itself. No state. Source: the man pages of
 * section 2; linux/sched.h, linux/prctl.h. */
#ifndef KIP_RESTORER_KERNEL_H
#define KIP_RESTORER_KERNEL_H

typedef unsigned long word;
typedef unsigned int u32;

enum { SYS_read = 0, SYS_close = 3, SYS_lseek = 8, SYS_mmap = 9, SYS_mprotect = 10, SYS_munmap = 11,
       SYS_rt_sigaction = 13, SYS_rt_sigprocmask = 14, SYS_mremap = 25, SYS_madvise = 28, SYS_dup3 = 292,
       SYS_setitimer = 38, SYS_sendmsg = 46, SYS_recvmsg = 47, SYS_execve = 59, SYS_exit_group = 231, SYS_kill = 62,
       SYS_fcntl = 72, SYS_flock = 73, SYS_fchdir = 81, SYS_chroot = 161, SYS_umask = 95, SYS_setpgid = 109, SYS_setsid = 112,
       SYS_setgroups = 116, SYS_setresuid = 117, SYS_setresgid = 119, SYS_setfsuid = 122, SYS_setfsgid = 123,
       SYS_capset = 126, SYS_sigaltstack = 131, SYS_personality = 135, SYS_setpriority = 141, SYS_sched_setscheduler = 144,
       SYS_mlock = 149, SYS_prctl = 157, SYS_futex = 202, SYS_set_tid_address = 218, SYS_timer_create = 222,
       SYS_timer_settime = 223, SYS_clock_gettime = 228, SYS_epoll_ctl = 233, SYS_openat = 257, SYS_set_robust_list = 273,
       SYS_preadv = 295, SYS_prlimit64 = 302, SYS_seccomp = 317, SYS_fstat = 5, SYS_rseq = 334, SYS_clone3 = 435,
       SYS_close_range = 436, SYS_membarrier = 324,
       SYS_rt_sigtimedwait = 128, SYS_rt_sigqueueinfo = 129, SYS_rt_tgsigqueueinfo = 297, SYS_waitid = 247, SYS_pidfd_open = 434,
       SYS_sched_yield = 24, SYS_ioctl = 16, SYS_write = 1, SYS_io_setup = 206, SYS_shmget = 29, SYS_shmat = 30, SYS_shmctl = 31, SYS_semget = 64,
       SYS_semctl = 66, SYS_msgget = 68, SYS_msgsnd = 69, SYS_msgctl = 71 };

enum { EPERM = 1, ENOENT = 2, ESRCH = 3, EINTR = 4, EIO = 5, EAGAIN = 11, EBUSY = 16, EINVAL = 22, ENOTTY = 25 };
enum { PROT_READ = 1, PROT_WRITE = 2, PROT_EXEC = 4, MAP_SHARED = 1, MAP_PRIVATE = 2, MAP_FIXED = 0x10,
       MAP_ANONYMOUS = 0x20, MREMAP_MAYMOVE = 1, MREMAP_FIXED = 2, MADV_POPULATE_WRITE = 23,
       MADV_GUARD_INSTALL = 102 };
enum { CLONE_VM = 0x100, CLONE_FS = 0x200, CLONE_FILES = 0x400, CLONE_SIGHAND = 0x800, CLONE_THREAD = 0x10000,
       CLONE_SYSVSEM = 0x40000, CLONE_PARENT = 0x8000, CLONE_PIDFD = 0x1000, SIGCHLD = 17, SIGALRM = 14, SIGSTOP = 19, SIGHUP = 1, SIGCONT = 18,
       SIGEV_NONE = 1, SIGEV_THREAD_ID = 4 };
enum { P_PID = 1, WSTOPPED = 2, WEXITED = 4, WNOWAIT = 0x1000000, WALL = 0x40000000, RLIMIT_CORE = 4, SIG_SETMASK = 2, SIG_UNBLOCK = 1, INFO_SIZE = 128 };
enum { O_WRONLY = 1, F_SETFD = 2, F_SETFL = 4, STATUS_FD = 3, O_NONBLOCK = 04000, O_CLOEXEC = 02000000, USERFAULTFD_IOC_NEW = 0xaa00, TIOCSCTTY = 0x540e, TIOCSPGRP = 0x5410, AT_FDCWD = -100, AT_SYSINFO_EHDR = 33 };
enum { IPC_CREAT = 01000, IPC_EXCL = 02000, IPC_NOWAIT = 04000, IPC_RMID = 0, IPC_SET = 1, IPC_STAT = 2, SETALL = 17, SHM_RDONLY = 010000 };

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

#endif
