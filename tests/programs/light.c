/* A program of a light sandbox. It asks what it may do, and is something that sleeps.
 *
 * light calls       each system call by its number, once, in a child: `call NUMBER RESULT`, where RESULT is an errno, `ok`, `waits`
 *                   (it did not come back) or `ended` (by a signal, or it does not return)
 * light limits      what of the limited calls is refused: `NAME ok` or `NAME ERRNO`
 * light files       what can be reached of files, processes and the kernel: `NAME ok` or `NAME ERRNO`
 * light             says `line NUMBER TEXT` to each line that comes, and what of it a sleep has changed
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

enum { LAST_CALL = 480, VFORK = 58, PATIENCE_MS = 300 };

static void said(const char *name, long result)
{
	if (result >= 0)
		printf("%s ok\n", name);
	else
		printf("%s %s\n", name, strerrorname_np(errno));
}

/* With arguments that no call can use: an address is at none, a descriptor not open. */
static void one_call(long number)
{
	int ends[2];
	if (pipe2(ends, O_CLOEXEC))
		exit(1);
	pid_t child = fork();
	if (child == 0) {
		long result = number == VFORK ? -1 : syscall(number, -1L, -1L, -1L, -1L, -1L, -1L);
		int code = result == -1 ? errno : 0;
		if (number == VFORK) {
			pid_t third = vfork();
			if (third == 0)
				_exit(0);
			code = third < 0 ? errno : 0;
		}
		_exit(write(ends[1], &code, sizeof code) != sizeof code);
	}
	close(ends[1]);
	struct pollfd end = { ends[0], POLLIN, 0 };
	int code;
	if (poll(&end, 1, PATIENCE_MS) == 0)
		printf("call %ld waits\n", number);
	else if (read(ends[0], &code, sizeof code) != sizeof code)
		printf("call %ld ended\n", number);
	else if (code)
		printf("call %ld %s\n", number, strerrorname_np(code) ? strerrorname_np(code) : "?");
	else
		printf("call %ld ok\n", number);
	kill(child, SIGKILL);
	close(ends[0]);
	while (waitpid(-1, NULL, 0) > 0)
		;
}

static int new_stack(void *unused)
{
	(void)unused;
	return 0;
}

static long cloned(int flags)
{
	static char stack[65536];
	int pid = clone(new_stack, stack + sizeof stack, flags | SIGCHLD, NULL);
	if (pid > 0)
		waitpid(pid, NULL, 0);
	return pid;
}

static void limits(void)
{
	int pair[2];
	said("socket-unix-stream", socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
	said("socket-unix-datagram", socket(AF_UNIX, SOCK_DGRAM, 0));
	said("socket-unix-seqpacket", socket(AF_UNIX, SOCK_SEQPACKET, 0));
	said("socket-inet", socket(AF_INET, SOCK_STREAM, 0));
	said("socket-inet6", socket(AF_INET6, SOCK_DGRAM, 0));
	said("socket-netlink", socket(AF_NETLINK, SOCK_RAW, 0));
	said("socket-packet", socket(AF_PACKET, SOCK_RAW, 0));
	said("socketpair-stream", socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
	said("socketpair-datagram", socketpair(AF_UNIX, SOCK_DGRAM, 0, pair));
	struct sockaddr_un name = { .sun_family = AF_UNIX, .sun_path = "\0kip-light" };
	int fd = socket(AF_UNIX, SOCK_STREAM, 0), one = 1;
	said("bind-abstract", bind(fd, (struct sockaddr *)&name, 12));
	said("listen", listen(fd, 1));
	said("pass-credentials", setsockopt(fd, SOL_SOCKET, SO_PASSCRED, &one, sizeof one));
	strcpy(name.sun_path, "/run/kip/runtime");
	said("connect-runtime", connect(fd, (struct sockaddr *)&name, sizeof name));
	said("thread", cloned(0));
	said("clone-user", cloned(CLONE_NEWUSER));
	said("clone-net", cloned(CLONE_NEWNET));
	said("clone-mount", cloned(CLONE_NEWNS));
	said("set-name", prctl(PR_SET_NAME, "light"));
	said("no-new-privs-again", prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
	said("set-seccomp", prctl(PR_SET_SECCOMP, 2, NULL));
	said("keep-capabilities", prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0));
	fd = open("/bin/sh", O_RDONLY);
	said("dup-descriptor", fcntl(fd, F_DUPFD_CLOEXEC, 10));
	struct flock lock = { .l_type = F_RDLCK };
	said("lock-record", fcntl(fd, F_SETLK, &lock));
	said("lease", fcntl(fd, F_SETLEASE, F_RDLCK));
	said("notify", fcntl(fd, F_NOTIFY, DN_ACCESS));
	int waiting;
	said("bytes-waiting", ioctl(fd, 0x541b, &waiting));
	said("type-at-terminal", ioctl(0, 0x5412, "x"));
	said("file-flags", ioctl(fd, 0x80086601, &waiting));
}

static long opened(const char *path, int flags)
{
	int fd = open(path, flags | O_CLOEXEC, 0600);
	if (fd >= 0)
		close(fd);
	return fd;
}

static void files(char **paths)
{
	said("own-program", opened("/bin/sh", O_RDONLY));
	said("null", opened("/dev/null", O_RDWR));
	said("random", opened("/dev/urandom", O_RDONLY));
	said("create-root", opened("/light-file", O_WRONLY | O_CREAT));
	said("create-tmp", opened("/tmp/light-file", O_WRONLY | O_CREAT));
	said("write-usr", opened("/usr/bin/env", O_WRONLY));
	said("write-null-device", opened("/dev/light", O_WRONLY | O_CREAT));
	said("proc-self", opened("/proc/self/status", O_RDONLY));
	said("proc-1", opened("/proc/1/environ", O_RDONLY));
	said("proc-net", opened("/proc/net/unix", O_RDONLY));
	said("sys", opened("/sys/kernel", O_RDONLY));
	said("terminals", opened("/dev/pts/ptmx", O_RDWR));
	said("shared-memory", opened("/dev/shm/light", O_RDWR | O_CREAT));
	said("memory-device", opened("/dev/mem", O_RDONLY));
	said("disk-device", opened("/dev/vda", O_RDONLY));
	for (; *paths; paths++)
		said(*paths, opened(*paths, O_RDONLY));
	said("kill-outside", kill(300000, 0));
	/* Pid 1 of the sandbox has no more than the program: the filter is what refuses these. */
	said("trace-parent", ptrace(PTRACE_SEIZE, getppid(), 0, 0));
	said("read-parent", syscall(SYS_process_vm_readv, getppid(), NULL, 0, NULL, 0, 0));
	said("pidfd", syscall(SYS_pidfd_open, getppid(), 0));
	said("mount", mount("none", "/tmp", "tmpfs", 0, NULL));
	said("unshare-user", unshare(CLONE_NEWUSER));
	said("chroot", chroot("/tmp"));
	said("mknod", mknod("/tmp/null", S_IFCHR | 0600, 0x103));
	said("add-key", syscall(SYS_add_key, "user", "light", "x", 1L, -3L));
	said("keyctl", syscall(SYS_keyctl, 0L, -3L, 0L));
	said("message-queue", syscall(SYS_msgget, 0x6b6970L, 01600L));
	said("shared-segment", syscall(SYS_shmget, 0x6b6970L, 4096L, 01600L));
	said("bpf", syscall(SYS_bpf, 0L, NULL, 0L));
	said("userfaultfd", syscall(SYS_userfaultfd, 0L));
	said("io-uring", syscall(SYS_io_uring_setup, 1L, NULL));
	said("landlock", syscall(SYS_landlock_create_ruleset, NULL, 0L, 1L));
	said("hostname", sethostname("light", 5));
	said("become-another", setresuid(1, 1, 1));
	said("watch-files", syscall(SYS_inotify_init1, 0L));
	said("lock-file", syscall(SYS_flock, open("/bin/sh", O_RDONLY), 2L));
	said("change-mode", chmod("/tmp", 0700));
}

static int count;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t counted = PTHREAD_COND_INITIALIZER;

static void *counter(void *read_end)
{
	char c;
	while (read(*(int *)read_end, &c, 1) == 1) {
		pthread_mutex_lock(&mutex);
		count++;
		pthread_cond_signal(&counted);
		pthread_mutex_unlock(&mutex);
	}
	return NULL;
}

/* What has to be as it was after each sleep: memory, a thread that waits, a child, a pair of sockets, a place in a file. */
static void serve(void)
{
	int ends[2], pair[2], told = 0;
	pthread_t thread;
	char line[200], first[8] = "", again[8] = "";
	int file = open("/usr/bin/env", O_RDONLY | O_CLOEXEC);
	if (pipe2(ends, O_CLOEXEC) || socketpair(AF_UNIX, SOCK_STREAM, 0, pair) || read(file, first, sizeof first - 1) < 4)
		exit(1);
	pthread_create(&thread, NULL, counter, &ends[0]);
	pid_t child = fork();
	if (child == 0) {
		char c;
		close(pair[0]);
		while (read(pair[1], &c, 1) == 1 && write(pair[1], &c, 1) == 1)
			;
		_exit(0);
	}
	close(pair[1]);
	printf("ready\n");
	fflush(stdout);
	while (fgets(line, sizeof line, stdin)) {
		char c = 0;
		told++;
		if (write(ends[1], "x", 1) != 1 || write(pair[0], "y", 1) != 1 || read(pair[0], &c, 1) != 1 || c != 'y')
			printf("broken pipes\n");
		pthread_mutex_lock(&mutex);
		while (count < told)
			pthread_cond_wait(&counted, &mutex);
		pthread_mutex_unlock(&mutex);
		if (lseek(file, 0, SEEK_CUR) != (off_t)sizeof first - 1 || pread(file, again, sizeof again - 1, 0) < 4 || memcmp(first, again, 4))
			printf("broken file\n");
		line[strcspn(line, "\n")] = 0;
		printf("line %d %s\n", told, line);
		fflush(stdout);
	}
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "";
	/* Children begin with nothing to print. */
	setvbuf(stdout, NULL, _IOLBF, 0);
	if (!strcmp(what, "calls"))
		for (long number = 0; number < LAST_CALL; number++)
			one_call(number);
	else if (!strcmp(what, "limits"))
		limits();
	else if (!strcmp(what, "files"))
		files(argv + 2);
	else
		serve();
	return 0;
}
