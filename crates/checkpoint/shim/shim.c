/*
 * Preloaded into `criu swrk FD`. Where CRIU would read its first request it is loaded and linked,
 * which takes longer than all that it does later in a small dump: there it stays, a template, and
 * forks a helper for each socket that it is sent. The template ends when the daemon closes its own
 * socket.
 *
 * A helper, before CRIU reads its request, takes messages of ours from its socket: a list of
 * orders, each about one descriptor that came along by SCM_RIGHTS. So a helper that was started
 * long ago can be given, at the moment of use, what CRIU only accepts as its own: namespaces to
 * stand in, a cgroup, mounts, and descriptors for the restored processes to inherit.
 *
 * CRIU's run id is one for all helpers of a template: names of abstract sockets that CRIU makes of it
 * differ by pid and by network namespace, of which each proc has its own.
 *
 * To the template: "KIPFORK1" and a socket; it answers with the helper's pid and an errno (u32,
 * u32), and a pidfd.
 *
 * Wire format (host byte order): "KIPSHIM1", u32 count, count times { u32 order, u32 argument }.
 * The answer is two words: 0, or 1 + the index of the order that failed followed by its errno (u32,
 * u32).
 *
 * To a helper that dumps, in place of an answer to CRIU: "KIPHOLD1", u32 count, count host pids of
 * processes that CRIU has stopped. The answer is an errno and, if that is 0, the host pids of as
 * many copies that hold their memory until the socket is closed.
 *
 * A message's descriptors arrive at the lowest free numbers and stay there until their orders are
 * carried out. A number that a descriptor is to be kept under must be free then (EBUSY): nothing
 * that is open is ever replaced. The daemon keeps to numbers above all at which one message's
 * descriptors can arrive. Crash: a helper that fails exits; the daemon sees the socket close and
 * takes another.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <linux/sockios.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "hold.h"

#define FDS_PER_MESSAGE 250
/* As fs.nr_open is by default: proc_sys_fs(5). */
#define MOST_OPEN_FILES 1048576

#ifndef SYS_move_mount
#define SYS_move_mount 429
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MOVE_MOUNT_F_EMPTY_PATH
#define MOVE_MOUNT_F_EMPTY_PATH 0x4
#endif

/* The argument of ioctl PAGEMAP_SCAN, in words, and categories of pages: linux/fs.h. */
#define PAGEMAP_SCAN 0xc0606610UL
enum scan_word { SCAN_END = 3, SCAN_WALKED = 4, SCAN_MASK = 9, SCAN_ANY = 10 };
enum scan_category { SCAN_FILE = 1 << 2, SCAN_PRESENT = 1 << 3, SCAN_SWAPPED = 1 << 4, SCAN_ZERO = 1 << 5 };

enum order { ORDER_DUP = 0, ORDER_SETNS = 1, ORDER_CGROUP = 2, ORDER_MOUNT = 3, ORDER_VOLUME = 4, ORDER_LEAVE_MEMORY = 5 };

struct one {
	uint32_t order, argument;
};

static ssize_t (*real_recv)(int, void *, size_t, int);
static long (*real_ptrace)(enum __ptrace_request, pid_t, void *, void *);
static int (*real_ioctl)(int, unsigned long, void *);
static int prepared, restoring, leaves_memory, holds;
/* The socket to the daemon. */
static int daemon_socket = -1;

/* All descriptors that the program had, and more, are open here at once. CRIU gives each process its own limit again. */
static void allow_open_files(void)
{
	struct rlimit most = { MOST_OPEN_FILES, MOST_OPEN_FILES };

	if (!setrlimit(RLIMIT_NOFILE, &most) || getrlimit(RLIMIT_NOFILE, &most))
		return;
	most.rlim_cur = most.rlim_max;
	setrlimit(RLIMIT_NOFILE, &most);
}

__attribute__((constructor)) static void start(void)
{
	real_recv = (ssize_t(*)(int, void *, size_t, int))dlsym(RTLD_NEXT, "recv");
	real_ptrace = (long (*)(enum __ptrace_request, pid_t, void *, void *))dlsym(RTLD_NEXT, "ptrace");
	if (!getenv("KIP_RUN"))
		return;
	/* A daemon that dies must not take a helper in the middle of a dump with it. */
	signal(SIGPIPE, SIG_IGN);
	allow_open_files();
	/* Children of CRIU's must not load us. */
	unsetenv("LD_PRELOAD");
	prctl(PR_SET_NAME, "criu-template", 0, 0, 0);
}

/*
 * A forked process has its parent's memory, but must fault for each page: those of programs and
 * libraries are not mapped in it at all, and what it writes to is copied first. That is done now,
 * while it waits, and not while a program stands still for its dump.
 */
static void populate(void)
{
	char line[512], mode[5];
	unsigned long from, to;
	FILE *maps = fopen("/proc/self/maps", "re");

	if (!maps)
		return;
	while (fgets(line, sizeof(line), maps)) {
		if (sscanf(line, "%lx-%lx %4s", &from, &to, mode) != 3 || mode[0] != 'r' || mode[3] != 'p')
			continue;
		/* Of an older kernel, or of a mapping that has no pages: it faults later. */
		madvise((void *)from, to - from, mode[1] == 'w' ? MADV_POPULATE_WRITE : MADV_POPULATE_READ);
	}
	fclose(maps);
}

/*
 * A mount namespace of the helper's own, with a tmpfs of ours as /run: CRIU finds its feature cache
 * there, and the places where the tree's files are attached, which the tree's own root has to be
 * able to reach.
 */
static void be_helper(void)
{
	const char *run = getenv("KIP_RUN");

	if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL))
		_exit(90);
	if (mount(run, "/run", NULL, MS_BIND, NULL))
		_exit(91);
	prctl(PR_SET_NAME, "criu-helper", 0, 0, 0);
	populate();
}

/* Other helpers have the same /run: what is there may be from one of them. */
static int mount_volume(uint32_t number, int fd)
{
	char place[64];
	struct stat status;
	int file;

	if (fstat(fd, &status))
		return -1;
	if (S_ISDIR(status.st_mode)) {
		snprintf(place, sizeof(place), "/run/kip/dir%u", number);
		if (mkdir(place, 0755) && errno != EEXIST)
			return -1;
	} else {
		snprintf(place, sizeof(place), "/run/kip/file%u", number);
		file = open(place, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
		if (file < 0)
			return -1;
		close(file);
	}
	return (int)syscall(SYS_move_mount, fd, "", -1, place, MOVE_MOUNT_F_EMPTY_PATH);
}

static int keep(int fd, int number)
{
	if (fcntl(number, F_GETFD) >= 0) {
		errno = EBUSY;
		return -1;
	}
	return dup2(fd, number) < 0 ? -1 : 0;
}

static int apply(struct one *o, int fd)
{
	switch (o->order) {
	case ORDER_DUP:
		return keep(fd, (int)o->argument);
	case ORDER_SETNS:
		return setns(fd, (int)o->argument);
	case ORDER_CGROUP:
		return write(fd, "0", 1) == 1 ? 0 : -1;
	case ORDER_MOUNT:
		restoring = 1;
		return (int)syscall(SYS_move_mount, fd, "", -1, o->argument == 0 ? "/run/kip/root" : "/run/kip/usr",
				    MOVE_MOUNT_F_EMPTY_PATH);
	case ORDER_VOLUME:
		return mount_volume(o->argument, fd);
	case ORDER_LEAVE_MEMORY:
		leaves_memory = 1;
		return 0;
	}
	errno = EINVAL;
	return -1;
}

/* Reads one message with its descriptors; returns how many came, fewer than were sent when the limit is reached. */
static int take(int sk, void *buf, size_t size, ssize_t *len, int *fds)
{
	union {
		char bytes[CMSG_SPACE(sizeof(int) * FDS_PER_MESSAGE)];
		struct cmsghdr align;
	} control;
	struct iovec iov = { buf, size };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control) };
	struct cmsghdr *c;
	int n = 0;

	do
		*len = recvmsg(sk, &m, MSG_CMSG_CLOEXEC);
	while (*len < 0 && errno == EINTR);
	if (*len <= 0 || (m.msg_flags & MSG_TRUNC))
		return -1;
	for (c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c))
		if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
			int got = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
			memcpy(fds + n, CMSG_DATA(c), sizeof(int) * got);
			n += got;
		}
	return n;
}

static void prepare(int sk)
{
	static char buf[16 + FDS_PER_MESSAGE * sizeof(struct one)];
	static int fds[FDS_PER_MESSAGE];
	uint32_t answer[2] = { 0, 0 };
	uint32_t more = 1, base = 0;

	while (more) {
		ssize_t len;
		int n = take(sk, buf, sizeof(buf), &len, fds);
		uint32_t count, i;
		struct one *orders = (struct one *)(buf + 16);

		if (n < 0 || len < 16 || memcmp(buf, "KIPSHIM1", 8))
			_exit(92);
		memcpy(&count, buf + 8, 4);
		memcpy(&more, buf + 12, 4);
		if (count < (uint32_t)n || len != (ssize_t)(16 + count * sizeof(struct one)))
			_exit(93);
		if (!answer[0] && (uint32_t)n < count) {
			answer[0] = base + n + 1;
			answer[1] = EMFILE;
		}
		for (i = 0; i < (uint32_t)n; i++) {
			if (!answer[0] && apply(&orders[i], fds[i])) {
				answer[0] = base + i + 1;
				answer[1] = (uint32_t)errno;
			}
			close(fds[i]);
		}
		base += count;
	}
	if (send(sk, answer, sizeof(answer), MSG_NOSIGNAL) != sizeof(answer) || answer[0])
		_exit(94);
}

/*
 * A restored process that runs already may end another one that CRIU is about to let go: that has
 * ended, and was not restored in vain. Its parent sees that only when its tracer has.
 */
static long let_end(pid_t pid)
{
	struct timespec pause = { 0, 1000000 };
	int tries;

	for (tries = 0; tries < 1000 && !waitpid(pid, NULL, __WALL | WNOHANG); tries++)
		nanosleep(&pause, NULL);
	return 0;
}

/*
 * A tree that CRIU froze for a dump and lets go again, because the dump failed or was called off,
 * must not notice: a thread whose system call CRIU interrupted is set back onto the call. This is
 * the only place from where that can be done when the daemon itself has died. Relative time-outs
 * then begin anew.
 */
long ptrace(enum __ptrace_request request, ...)
{
	struct user_regs_struct regs;
	va_list list;
	pid_t pid;
	void *address, *data;
	long done;

	va_start(list, request);
	pid = va_arg(list, pid_t);
	address = va_arg(list, void *);
	data = va_arg(list, void *);
	va_end(list);
	if (request == PTRACE_DETACH && !restoring && !real_ptrace(PTRACE_GETREGS, pid, NULL, &regs) &&
	    (long)regs.orig_rax >= 0) {
		long result = (long)regs.rax;

		/* EINTR, and the kernel's ERESTARTSYS, -NOINTR, -NOHAND and _RESTARTBLOCK. */
		if (result == -EINTR || (result <= -512 && result >= -514) || result == -516) {
			regs.rax = regs.orig_rax;
			regs.rip -= 2;
			regs.orig_rax = (unsigned long)-1;
			real_ptrace(PTRACE_SETREGS, pid, NULL, &regs);
		}
	}
	done = real_ptrace(request, pid, address, data);
	return request == PTRACE_DETACH && restoring && done && errno == ESRCH ? let_end(pid) : done;
}

/*
 * Packets of clients come while a program is dumped. CRIU asks how long the queues of a connection are, and fails if they
 * are longer or shorter when it copies them. A dump of ours needs no copy: the kernel's own sockets are kept. So CRIU hears
 * that they are empty. It asks that of nothing else.
 *
 * Where copies of the processes are to hold their memory (hold.c) CRIU hears that no page of theirs is there: it scans for
 * those that are in memory or in swap, and not for others (guards) with the same words.
 */
int ioctl(int fd, unsigned long request, ...)
{
	va_list list;
	void *argument;
	int done;

	va_start(list, request);
	argument = va_arg(list, void *);
	va_end(list);
	/* Libraries that begin before this one may ask already. */
	if (!real_ioctl)
		real_ioctl = (int (*)(int, unsigned long, void *))dlsym(RTLD_NEXT, "ioctl");
	if (leaves_memory && request == PAGEMAP_SCAN) {
		uint64_t *words = argument;

		if (words[SCAN_MASK] == (SCAN_FILE | SCAN_ZERO) && words[SCAN_ANY] == (SCAN_PRESENT | SCAN_SWAPPED)) {
			words[SCAN_WALKED] = words[SCAN_END];
			return 0;
		}
	}
	done = real_ioctl(fd, request, argument);
	if (!done && !restoring && (request == SIOCINQ || request == SIOCOUTQ || request == SIOCOUTQNSD))
		*(int *)argument = 0;
	return done;
}

/* Answers with the helper's pid and pidfd. */
static int answer(int sk, pid_t pid)
{
	uint32_t words[2] = { (uint32_t)pid, 0 };
	union {
		char bytes[CMSG_SPACE(sizeof(int))];
		struct cmsghdr align;
	} control;
	struct iovec iov = { words, sizeof(words) };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1 };
	struct cmsghdr *c;
	int pidfd = -1, sent;

	if (pid > 0)
		pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
	if (pidfd < 0) {
		words[1] = (uint32_t)errno;
	} else {
		m.msg_control = &control;
		m.msg_controllen = sizeof(control);
		c = CMSG_FIRSTHDR(&m);
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(c), &pidfd, sizeof(int));
	}
	sent = sendmsg(sk, &m, MSG_NOSIGNAL) == sizeof(words) ? 0 : -1;
	if (pidfd >= 0)
		close(pidfd);
	return sent;
}

/* Reaped by hand, helpers are counted in the template's times: proc_pid_stat(5). */
static void reap(int number)
{
	int kept = errno;

	(void)number;
	while (waitpid(-1, NULL, WNOHANG) > 0)
		;
	errno = kept;
}

/* Forks a helper for each socket that comes; returns in the helpers, whose socket has the number `sk`. */
static void fork_helpers(int sk)
{
	char buf[8];
	int fds[FDS_PER_MESSAGE];
	struct sigaction reaping = { .sa_handler = reap, .sa_flags = SA_RESTART | SA_NOCLDSTOP };
	sigset_t ends, before;

	sigemptyset(&ends);
	sigaddset(&ends, SIGCHLD);
	sigaction(SIGCHLD, &reaping, NULL);
	for (;;) {
		ssize_t len;
		int n = take(sk, buf, sizeof(buf), &len, fds);
		pid_t pid;

		if (n < 0)
			_exit(0);
		if (n != 1 || len != sizeof(buf) || memcmp(buf, "KIPFORK1", sizeof(buf)))
			_exit(95);
		/* Until its pidfd is open its number is no other's. */
		sigprocmask(SIG_BLOCK, &ends, &before);
		pid = fork();
		if (!pid) {
			signal(SIGCHLD, SIG_DFL);
			sigprocmask(SIG_SETMASK, &before, NULL);
			/* Without close-on-exec, as CRIU was given it. */
			if (dup2(fds[0], sk) < 0)
				_exit(96);
			close(fds[0]);
			be_helper();
			return;
		}
		close(fds[0]);
		if (answer(sk, pid))
			_exit(0);
		sigprocmask(SIG_SETMASK, &before, NULL);
	}
}

/* Where the daemon asks for it, between two of its answers to CRIU, has copies of processes hold their memory. */
static void hold_if_asked(int sk)
{
	static uint32_t message[3 + MOST_HELD], answer[1 + MOST_HELD];
	char head[8];
	ssize_t length;
	uint32_t count;

	while (real_recv(sk, head, sizeof(head), MSG_PEEK) == sizeof(head) && !memcmp(head, "KIPHOLD1", sizeof(head))) {
		length = real_recv(sk, message, sizeof(message), 0);
		count = length < 12 ? 0 : message[2];
		if (count > MOST_HELD || length != (ssize_t)(12 + count * sizeof(uint32_t)))
			_exit(97);
		answer[0] = (uint32_t)hold(real_ptrace, message + 3, count, answer + 1);
		holds = !answer[0];
		daemon_socket = sk;
		length = (ssize_t)((answer[0] ? 1 : 1 + count) * sizeof(uint32_t));
		if (send(sk, answer, (size_t)length, MSG_NOSIGNAL) != length)
			return;
	}
}

/* The copies end with this process: it stays until the daemon has read them. */
__attribute__((destructor)) static void stay(void)
{
	char nothing;

	while (holds && real_recv(daemon_socket, &nothing, 1, 0) > 0)
		;
}

ssize_t recv(int sk, void *buf, size_t len, int flags)
{
	if (!prepared) {
		prepared = 1;
		if (getenv("KIP_RUN")) {
			fork_helpers(sk);
			prepare(sk);
		}
	}
	if (leaves_memory)
		hold_if_asked(sk);
	return real_recv(sk, buf, len, flags);
}
