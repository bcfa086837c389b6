/* The red team: tries, from inside a proc, to reach what is not the proc's. One line per attempt:
 *
 *   REFUSED name detail     the attempt failed, as it must
 *   GOT name detail         it succeeded
 *
 * Usage: red KEY=VALUE..   What cannot be known from inside comes as arguments: paths with a secret in them, pids,
 * addresses, names of sockets. Run natively as root it is its own positive control: nearly everything is GOT there. It
 * changes nothing: files are opened for writing but not written, sockets are connected but not used. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/if.h>
#include <linux/if_packet.h>
#include <linux/io_uring.h>
#include <linux/vm_sockets.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/syscall.h>
#include <sys/timex.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

static void report(bool got, const char *name, const char *detail) {
    printf("%s %s %s\n", got ? "GOT" : "REFUSED", name, detail);
    fflush(stdout);
}
static void by_errno(const char *name, long result) {
    report(result >= 0, name, result >= 0 ? "succeeded" : strerrorname_np(errno));
}

/* Files */

static bool contains(int fd, const char *secret) {
    static char buf[1 << 20];
    ssize_t n = read(fd, buf, sizeof buf);
    return n > 0 && memmem(buf, (size_t)n, secret, strlen(secret));
}

/* read=NAME:PATH:SECRET */
static void try_read(char *spec) {
    char *name = strtok(spec, ":"), *path = strtok(NULL, ":"), *secret = strtok(NULL, "");
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        report(false, name, strerrorname_np(errno));
        return;
    }
    report(contains(fd, secret), name, "opened");
    close(fd);
}

static void open_for(const char *name, const char *path, int flags) {
    int fd = open(path, flags | O_CLOEXEC | O_NONBLOCK);
    by_errno(name, fd);
    if (fd >= 0) close(fd);
}

/* Escapes by what /proc shows of other processes, pid 1 of the sandbox included. secret=TEXT is in the host's files and
 * in another proc's command line, environment and files. */
static void try_proc(const char *secret) {
    struct stat own, other;
    char path[600], detail[640];
    bool seen = false, rooted = false;
    DIR *d = opendir("/proc");
    stat("/", &own);
    for (struct dirent *e; d && (e = readdir(d));) {
        if (e->d_name[0] < '0' || e->d_name[0] > '9' || atoi(e->d_name) == getpid()) continue;
        for (int i = 0; i < 2; i++) {
            snprintf(path, sizeof path, "/proc/%s/%s", e->d_name, i ? "environ" : "cmdline");
            int fd = open(path, O_RDONLY);
            if (fd >= 0 && contains(fd, secret)) seen = true, snprintf(detail, sizeof detail, "%s", path);
            if (fd >= 0) close(fd);
        }
        snprintf(path, sizeof path, "/proc/%s/root", e->d_name);
        if (stat(path, &other) == 0 && (other.st_ino != own.st_ino || other.st_dev != own.st_dev)) rooted = true;
        snprintf(path, sizeof path, "/proc/%s/cwd/..", e->d_name);
        for (int up = 0; up < 8 && stat(path, &other) == 0; up++) strcat(path, "/..");
        if (stat(path, &other) == 0 && (other.st_ino != own.st_ino || other.st_dev != own.st_dev)) rooted = true;
        snprintf(path, sizeof path, "/proc/%s/exe", e->d_name);
        if (atoi(e->d_name) == 1) open_for("write-init-exe", path, O_WRONLY);
    }
    if (d) closedir(d);
    report(seen, "proc-shows-others", seen ? detail : "none has the secret");
    report(rooted, "root-of-another-process", rooted ? "differs from ours" : "all are ours");
}

/* Descriptors that were not meant to be inherited: of ours and of pid 1, any directory outside or any socket. */
static void try_descriptors(void) {
    for (int who = 0; who < 2; who++) {
        char path[400], target[300], detail[300] = "none";
        bool got = false;
        snprintf(path, sizeof path, "/proc/%s/fd", who ? "1" : "self");
        DIR *d = opendir(path);
        for (struct dirent *e; d && (e = readdir(d));) {
            if (atoi(e->d_name) <= 2 || (!who && atoi(e->d_name) == dirfd(d))) continue;
            snprintf(path, sizeof path, "/proc/%s/fd/%s", who ? "1" : "self", e->d_name);
            ssize_t n = readlink(path, target, sizeof target - 1);
            if (n <= 0) continue;
            target[n] = 0;
            struct stat s;
            bool dir = stat(path, &s) == 0 && S_ISDIR(s.st_mode);
            if (!who || dir || !strncmp(target, "socket:", 7)) got = true, snprintf(detail, sizeof detail, "%s", target);
        }
        if (d) closedir(d);
        report(got, who ? "descriptors-of-pid-1" : "inherited-descriptors", detail);
    }
}

static void try_devices(void) {
    static const struct { const char *name; int major, minor; } nodes[] = {
        { "mknod-mem", 1, 1 }, { "mknod-disk", 254, 0 }, { "mknod-kvm", 10, 232 }, { "mknod-null", 1, 3 } };
    for (size_t i = 0; i < sizeof nodes / sizeof *nodes; i++) {
        char path[64];
        snprintf(path, sizeof path, "/tmp/red-%s", nodes[i].name);
        unlink(path);
        by_errno(nodes[i].name, mknod(path, (i == 1 ? S_IFBLK : S_IFCHR) | 0600, makedev(nodes[i].major, nodes[i].minor)));
        unlink(path);
    }
    open_for("dev-mem", "/dev/mem", O_RDONLY);
    open_for("dev-disk", "/dev/vda", O_RDONLY);
    open_for("dev-kvm", "/dev/kvm", O_RDWR);
    open_for("dev-fuse", "/dev/fuse", O_RDWR);
    open_for("dev-tun", "/dev/net/tun", O_RDWR);
    open_for("dev-kmsg", "/dev/kmsg", O_RDONLY);
    open_for("dev-loop-control", "/dev/loop-control", O_RDWR);
    open_for("dev-userfaultfd", "/dev/userfaultfd", O_RDWR);
    open_for("dev-tty-of-host", "/dev/console", O_RDWR);
}

static void try_proc_files(void) {
    static const char *writable[] = { "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname",
        "/proc/sys/kernel/modprobe", "/proc/sys/vm/drop_caches", "/proc/sys/vm/overcommit_memory",
        "/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv4/conf/all/route_localnet",
        "/proc/sys/net/ipv4/ip_unprivileged_port_start", "/proc/sys/fs/file-max",
        "/proc/sysrq-trigger", "/proc/irq/default_smp_affinity", "/proc/sys/fs/binfmt_misc/register" };
    static const char *readable[] = { "/proc/kcore", "/proc/kmsg", "/proc/keys", "/proc/timer_list",
        "/proc/sched_debug", "/proc/kpageflags", "/proc/kpagecount", "/proc/vmallocinfo", "/proc/slabinfo" };
    char name[120];
    for (size_t i = 0; i < sizeof writable / sizeof *writable; i++) {
        snprintf(name, sizeof name, "write:%s", writable[i]);
        open_for(name, writable[i], O_WRONLY);
    }
    for (size_t i = 0; i < sizeof readable / sizeof *readable; i++) {
        char c[256];
        snprintf(name, sizeof name, "read:%s", readable[i]);
        int fd = open(readable[i], O_RDONLY | O_CLOEXEC | O_NONBLOCK);
        ssize_t n = fd < 0 ? -1 : read(fd, c, sizeof c);
        if (n == 0) errno = ENODATA, n = -1; /* masked by /dev/null */
        by_errno(name, n);
        if (fd >= 0) close(fd);
    }
    FILE *f = fopen("/proc/kallsyms", "r");
    unsigned long long address = 0;
    if (f && fscanf(f, "%llx", &address) != 1) address = 0;
    if (f) fclose(f);
    report(address != 0, "kernel-addresses", address ? "kallsyms shows them" : "zero or none");
    f = fopen("/proc/self/oom_score_adj", "w");
    bool ok = f && fputs("-900", f) >= 0 && fflush(f) == 0;
    report(ok, "oom-immunity", ok ? "-900 was taken" : "no");
    if (f) fclose(f);
}

/* Namespaces and mounts */

static void *in_child(long (*f)(void)) { /* so that success changes nothing for the next attempt */
    int p[2];
    long out[2] = { -1, ECHILD };
    if (pipe(p)) return NULL;
    pid_t pid = fork();
    if (pid == 0) {
        errno = 0;
        out[0] = f(), out[1] = errno;
        if (write(p[1], out, sizeof out) != sizeof out) _exit(1);
        _exit(0);
    }
    close(p[1]);
    if (read(p[0], out, sizeof out) != sizeof out) out[0] = -1, out[1] = ECHILD;
    close(p[0]);
    waitpid(pid, NULL, 0);
    errno = (int)out[1];
    return (void *)(intptr_t)(out[0] < 0 ? -1 : 0);
}
static void isolated(const char *name, long (*f)(void)) { by_errno(name, (intptr_t)in_child(f)); }

static long do_mount(void) { return mount("none", "/tmp", "tmpfs", 0, NULL); }
static long do_bind(void) { return mount("/", "/tmp", NULL, MS_BIND | MS_REC, NULL); }
static long do_remount(void) { return mount(NULL, "/", NULL, MS_REMOUNT | MS_BIND, NULL); }
static long do_mount_proc(void) { return mount("proc", "/tmp", "proc", 0, NULL); }
static long do_mount_sys(void) { return mount("sysfs", "/tmp", "sysfs", 0, NULL); }
static long do_mount_cgroup(void) {
    if (mount("none", "/tmp", "cgroup", 0, "memory") == 0) return 0;
    return mount("none", "/tmp", "cgroup2", 0, NULL);
}
static long do_umount(void) { return umount2("/proc/kcore", MNT_DETACH) == 0 ? 0 : umount2("/proc", MNT_DETACH); }
static long do_fsopen(void) { return syscall(SYS_fsopen, "tmpfs", 0); }
static long do_open_tree(void) { return syscall(SYS_open_tree, AT_FDCWD, "/", 1 /* OPEN_TREE_CLONE */); }
static long do_userns(void) { return unshare(CLONE_NEWUSER); }
static long do_mntns(void) { return unshare(CLONE_NEWNS); }
static long do_netns(void) { return unshare(CLONE_NEWNET); }
static long do_timens(void) { return unshare(CLONE_NEWTIME); }
static long do_clone_userns(void) {
    long pid = syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0);
    if (pid == 0) _exit(0);
    return pid;
}
static long do_clone3(void) {
    struct { uint64_t flags, pidfd, child, parent, exit, stack, size, tls; } a = { .flags = CLONE_NEWUSER, .exit = SIGCHLD };
    long pid = syscall(SYS_clone3, &a, sizeof a);
    if (pid == 0) _exit(0);
    return pid;
}
static long do_setns(void) {
    int fd = open("/proc/1/ns/mnt", O_RDONLY);
    return fd < 0 ? -1 : setns(fd, 0);
}
static long do_chroot_escape(void) { /* the classic: only a difference of / counts */
    struct stat before, after;
    stat("/", &before);
    mkdir("/tmp/red-jail", 0700);
    int out = open("/", O_RDONLY | O_DIRECTORY);
    if (chroot("/tmp/red-jail")) return -1;
    if (fchdir(out)) return -1;
    for (int i = 0; i < 64; i++)
        if (chdir("..")) return -1;
    if (chroot(".")) return -1;
    stat("/", &after);
    if (before.st_ino == after.st_ino && before.st_dev == after.st_dev) errno = EXDEV;
    return before.st_ino == after.st_ino && before.st_dev == after.st_dev ? -1 : 0;
}
static long do_hostname(void) { return sethostname("red", 3); }
static long do_shadow_shocker(void) { /* open_by_handle_at(2) on inode 2, the root of a filesystem */
    struct { struct file_handle h; unsigned char f[8]; } x = { .h = { .handle_bytes = 8, .handle_type = 1 }, .f = { 2 } };
    int fd = open("/usr/bin/env", O_RDONLY);
    return open_by_handle_at(fd, &x.h, O_RDONLY);
}

/* Wide doors */

static long do_bpf(void) {
    struct { uint32_t type, key, value, max; } a = { 2, 4, 4, 1 };
    return syscall(SYS_bpf, 0, &a, sizeof a);
}
static long do_perf(void) {
    char a[128] = { 0 };
    a[4] = sizeof a;
    return syscall(SYS_perf_event_open, a, 0, -1, -1, 0);
}
static long do_uring(void) {
    struct io_uring_params p = { 0 };
    return syscall(SYS_io_uring_setup, 4, &p);
}
static long do_uffd(void) { return syscall(SYS_userfaultfd, O_CLOEXEC); }
static long do_add_key(void) { return syscall(SYS_add_key, "user", "red", "x", 1, -3); }
static long do_keyctl(void) { return syscall(SYS_keyctl, 0 /* GET_KEYRING_ID */, -3, 1); }
static long do_module(void) {
    int fd = open("/proc/self/exe", O_RDONLY);
    long r = syscall(SYS_finit_module, fd, "", 0);
    return r < 0 && errno == ENOEXEC ? 0 : r; /* the permission was there */
}
static long do_kexec(void) {
    long r = syscall(SYS_kexec_load, 0, 0, NULL, 0xffff0000u);
    return r < 0 && errno == EINVAL ? 0 : r;
}
static long do_reboot(void) { /* wrong magic: EINVAL where permitted */
    long r = syscall(SYS_reboot, 1, 2, 3, NULL);
    return r < 0 && errno == EINVAL ? 0 : r;
}
static long do_swapon(void) {
    long r = syscall(SYS_swapon, "/nonexistent", 0);
    return r < 0 && errno == ENOENT ? 0 : r;
}
static long do_adjtime(void) {
    struct timex now = { .modes = 0 };
    if (adjtimex(&now) < 0) return -1;
    struct timex same = { .modes = ADJ_STATUS, .status = now.status };
    return adjtimex(&same);
}
static long do_iopl(void) { return syscall(SYS_iopl, 3); }
static long do_syslog(void) {
    char b[64];
    return syscall(SYS_syslog, 3, b, sizeof b);
}
static long do_acct(void) { return syscall(SYS_acct, NULL); }
static long do_nice(void) { return setpriority(PRIO_PROCESS, 0, -10); }
static long do_realtime(void) {
    struct sched_param p = { .sched_priority = 1 };
    return sched_setscheduler(0, SCHED_FIFO, &p);
}
static long do_setuid_outside(void) { return setresuid(70000, 70000, 70000); }
static long do_chown_outside(void) {
    int fd = open("/tmp/red-chown", O_CREAT | O_RDWR, 0600);
    long r = fd < 0 ? -1 : fchown(fd, 0x20000000, 0x20000000);
    unlink("/tmp/red-chown");
    return r;
}
static long do_nofile(void) {
    struct rlimit l;
    getrlimit(RLIMIT_NOFILE, &l);
    l.rlim_max += 1, l.rlim_cur = l.rlim_max;
    return setrlimit(RLIMIT_NOFILE, &l);
}
static long do_caps_back(void) { /* whether the bounding set still has one of the dangerous ones */
    static const int bad[] = { CAP_SYS_ADMIN, CAP_NET_ADMIN, CAP_NET_RAW, CAP_SYS_PTRACE, CAP_SYS_MODULE, CAP_SYS_RAWIO,
        CAP_SYS_BOOT, CAP_SYS_TIME, CAP_MKNOD, CAP_DAC_READ_SEARCH, CAP_SYS_RESOURCE, CAP_BPF, CAP_PERFMON, CAP_SYSLOG };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        if (prctl(PR_CAPBSET_READ, bad[i]) == 1) return bad[i];
    errno = EPERM;
    return -1;
}
static long do_32_bit(void) { /* int 0x80 passes a filter that knows only the 64-bit numbers: sethostname is 74 */
    long r;
    static char name[] = "red";
    __asm__ volatile("int $0x80" : "=a"(r) : "a"(74), "b"((long)(intptr_t)name), "c"(3) : "memory");
    if (r < 0) errno = (int)-r;
    return r < 0 ? -1 : 0;
}

/* Other processes: pids=HOSTPID,HOSTPID.. as the host numbers them. */

static void try_pids(char *list) {
    bool signalled = false, pidfd = false, traced = false, readable = false;
    for (char *p = strtok(list, ","); p; p = strtok(NULL, ",")) {
        pid_t pid = atoi(p);
        if (kill(pid, 0) == 0) signalled = true;
        long fd = syscall(SYS_pidfd_open, pid, 0);
        if (fd >= 0) pidfd = true, close((int)fd);
        if (ptrace(PTRACE_SEIZE, pid, 0, 0) == 0) traced = true, ptrace(PTRACE_DETACH, pid, 0, 0);
        char b[8];
        struct iovec l = { b, 8 }, r = { (void *)0x400000, 8 };
        if (process_vm_readv(pid, &l, 1, &r, 1, 0) >= 0 || errno == EFAULT) readable = true;
    }
    report(signalled, "signal-others", signalled ? "kill(pid, 0)" : "ESRCH");
    report(pidfd, "pidfd-of-others", pidfd ? "pidfd_open" : "ESRCH");
    report(traced, "ptrace-others", traced ? "seized" : "no");
    report(readable, "memory-of-others", readable ? "process_vm_readv" : "no");
}

/* Network. connect=NAME:ADDRESS:PORT, PORT after the last colon. */

static void try_connect(char *spec, const char *device) {
    char *colon = strchr(spec, ':'), *last = strrchr(spec, ':');
    *colon = *last = 0;
    const char *host = colon + 1;
    int port = atoi(last + 1);
    bool six = strchr(host, ':') != NULL;
    int fd = socket(six ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    struct sockaddr_in6 a6 = { .sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port) };
    struct sockaddr_in a4 = { .sin_family = AF_INET, .sin_port = htons((uint16_t)port) };
    inet_pton(six ? AF_INET6 : AF_INET, host, six ? (void *)&a6.sin6_addr : (void *)&a4.sin_addr);
    if (device) setsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, device, (socklen_t)strlen(device));
    int r = connect(fd, six ? (void *)&a6 : (void *)&a4, six ? sizeof a6 : sizeof a4), e = errno;
    if (r < 0 && e == EINPROGRESS) {
        struct pollfd p = { .fd = fd, .events = POLLOUT };
        socklen_t n = sizeof e;
        e = ETIMEDOUT;
        if (poll(&p, 1, 500) == 1) getsockopt(fd, SOL_SOCKET, SO_ERROR, &e, &n);
        r = e ? -1 : 0;
    }
    errno = e;
    by_errno(spec, r);
    close(fd);
}

/* abstract=NAME of a unix socket of the host */
static void try_abstract(const char *name) {
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    strncpy(a.sun_path + 1, name, sizeof a.sun_path - 2);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    by_errno("abstract-socket", connect(fd, (void *)&a, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(name))));
    close(fd);
}

static void try_socket(const char *name, int family, int type, int protocol) {
    int fd = socket(family, type, protocol);
    by_errno(name, fd);
    if (fd >= 0) close(fd);
}

static void try_network(void) {
    try_socket("raw-socket", AF_INET, SOCK_RAW, IPPROTO_ICMP);
    try_socket("raw-socket-6", AF_INET6, SOCK_RAW, 58);
    try_socket("packet-socket", AF_PACKET, SOCK_RAW, htons(3));
    try_socket("vsock", AF_VSOCK, SOCK_STREAM, 0);
    try_socket("alg-socket", AF_ALG, SOCK_SEQPACKET, 0);
    int fd = socket(AF_INET, SOCK_DGRAM, 0);
    int one = 1;
    by_errno("transparent", setsockopt(fd, SOL_IP, 19 /* IP_TRANSPARENT */, &one, sizeof one));
    by_errno("priority-mark", setsockopt(fd, SOL_SOCKET, SO_MARK, &one, sizeof one));
    close(fd);
}

/* spoof=NAME:SOURCE,DESTINATION,PORT,TEXT: a datagram with another's address as source. Whether it arrives is for the
 * receiver to say. */
static void try_spoof(char *spec) {
    char *name = strtok(spec, ":"), *from = strtok(NULL, ","), *to = strtok(NULL, ","), *port = strtok(NULL, ",");
    char *text = strtok(NULL, "");
    bool six = strchr(to, ':') != NULL;
    int one = 1, fd = socket(six ? AF_INET6 : AF_INET, SOCK_DGRAM, 0);
    struct sockaddr_in6 a6 = { .sin6_family = AF_INET6 }, b6 = { .sin6_family = AF_INET6, .sin6_port = htons((uint16_t)atoi(port)) };
    struct sockaddr_in a4 = { .sin_family = AF_INET }, b4 = { .sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(port)) };
    inet_pton(six ? AF_INET6 : AF_INET, from, six ? (void *)&a6.sin6_addr : (void *)&a4.sin_addr);
    inet_pton(six ? AF_INET6 : AF_INET, to, six ? (void *)&b6.sin6_addr : (void *)&b4.sin_addr);
    setsockopt(fd, SOL_IP, 15 /* IP_FREEBIND */, &one, sizeof one);
    setsockopt(fd, SOL_IPV6, 78 /* IPV6_FREEBIND */, &one, sizeof one);
    long r = bind(fd, six ? (void *)&a6 : (void *)&a4, six ? sizeof a6 : sizeof a4);
    if (r == 0) r = sendto(fd, text, strlen(text), 0, six ? (void *)&b6 : (void *)&b4, six ? sizeof b6 : sizeof b4);
    printf("SENT %s %s\n", name, r < 0 ? strerrorname_np(errno) : "sent");
    close(fd);
}

int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        char *eq = strchr(argv[i], '=');
        if (!eq) return 2;
        *eq = 0;
        char *value = strdup(eq + 1);
        if (!strcmp(argv[i], "read")) try_read(value);
        else if (!strcmp(argv[i], "secret")) try_proc(value);
        else if (!strcmp(argv[i], "pids")) try_pids(value);
        else if (!strcmp(argv[i], "connect")) try_connect(value, NULL);
        else if (!strcmp(argv[i], "connect-by-device")) try_connect(value, "eth0");
        else if (!strcmp(argv[i], "abstract")) try_abstract(value);
        else if (!strcmp(argv[i], "spoof")) try_spoof(value);
        else return 2;
        free(value);
    }
    try_descriptors();
    try_devices();
    try_proc_files();
    try_network();
    isolated("mount-tmpfs", do_mount), isolated("mount-bind", do_bind), isolated("mount-remount", do_remount);
    isolated("mount-proc", do_mount_proc), isolated("mount-sysfs", do_mount_sys), isolated("mount-cgroup", do_mount_cgroup);
    isolated("umount-mask", do_umount), isolated("fsopen", do_fsopen), isolated("open_tree", do_open_tree);
    isolated("unshare-user", do_userns), isolated("unshare-mount", do_mntns), isolated("unshare-net", do_netns);
    isolated("unshare-time", do_timens), isolated("clone-user", do_clone_userns), isolated("clone3-user", do_clone3);
    isolated("setns", do_setns), isolated("chroot-escape", do_chroot_escape), isolated("open-by-handle", do_shadow_shocker);
    isolated("sethostname", do_hostname), isolated("bpf", do_bpf), isolated("perf", do_perf), isolated("io_uring", do_uring);
    isolated("userfaultfd", do_uffd), isolated("add_key", do_add_key), isolated("keyctl", do_keyctl);
    isolated("load-module", do_module), isolated("kexec", do_kexec), isolated("reboot", do_reboot);
    isolated("swapon", do_swapon), isolated("adjust-clock", do_adjtime);
    isolated("iopl", do_iopl), isolated("kernel-log", do_syslog), isolated("acct", do_acct);
    isolated("raise-priority", do_nice), isolated("realtime", do_realtime), isolated("setuid-outside", do_setuid_outside);
    isolated("chown-outside", do_chown_outside), isolated("raise-nofile", do_nofile);
    isolated("dangerous-capabilities", do_caps_back), isolated("32-bit-calls", do_32_bit);
    return 0;
}
