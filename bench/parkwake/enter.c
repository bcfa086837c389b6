/* Starts a server in a root directory, with namespaces of its own or with none but a mount namespace.
 *
 *   enter native|sandbox ROOT NETNS|- COMMAND [ARGUMENT]...
 *
 * Prints one line, "PID NANOSECONDS": the server's host pid and CLOCK_MONOTONIC just before its exec; then waits for it
 * and exits with it. `native` is a chroot: the mount namespace exists only so that the bind mounts of the root vanish with
 * the server. `sandbox` has pid, mount, uts and ipc namespaces, as one makes them by hand for CRIU. In both, the root is
 * ROOT with the host's /usr and a /proc, NETNS is the network namespace to stand in. A native server dies
 * with us, and we die with the process that started us. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static void die(const char *what)
{
	fprintf(stderr, "enter: %s: %s\n", what, strerror(errno));
	exit(125);
}

static void enter_root(const char *root, int pivot)
{
	if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL))
		die("make mounts private");
	if (mount(root, root, NULL, MS_BIND, NULL) || chdir(root))
		die(root);
	if (mount("/usr", "usr", NULL, MS_BIND, NULL))
		die("bind /usr");
	if (mount("proc", "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL))
		die("mount /proc");
	if (pivot) {
		if (syscall(SYS_pivot_root, ".", ".") || umount2(".", MNT_DETACH))
			die("pivot_root");
	} else if (chroot("."))
		die("chroot");
	if (chdir("/"))
		die("/");
}

static void place_stdio(void)
{
	int in = open("/dev/null", O_RDONLY);
	int out = open("/tmp/output", O_WRONLY | O_CREAT | O_APPEND, 0666);
	if (in < 0 || out < 0)
		die("stdio");
	dup2(in, 0);
	dup2(out, 1);
	dup2(out, 2);
	for (int fd = 3; fd < 64; fd++)
		close(fd);
}

int main(int argc, char **argv)
{
	if (argc < 5)
		return 2;
	int sandbox = !strcmp(argv[1], "sandbox");
	int mark[2], status;
	struct timespec now;
	pid_t us = getpid();

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (strcmp(argv[3], "-")) {
		int net = open(argv[3], O_RDONLY | O_CLOEXEC);
		if (net < 0 || setns(net, CLONE_NEWNET))
			die(argv[3]);
	}
	if (unshare(CLONE_NEWNS | (sandbox ? CLONE_NEWPID | CLONE_NEWUTS | CLONE_NEWIPC : 0)))
		die("unshare");
	if (pipe2(mark, O_CLOEXEC))
		die("pipe");
	pid_t child = fork();
	if (child < 0)
		die("fork");
	if (child == 0) {
		/* Not in the sandbox: CRIU would restore it, and the restored server would die with CRIU. */
		if (!sandbox && (prctl(PR_SET_PDEATHSIG, SIGKILL) || getppid() != us))
			_exit(125);
		setsid();
		enter_root(argv[2], sandbox);
		int kept = fcntl(mark[1], F_DUPFD_CLOEXEC, 64);
		place_stdio();
		clearenv();
		setenv("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", 1);
		setenv("HOME", "/root", 1);
		clock_gettime(CLOCK_MONOTONIC, &now);
		if (write(kept, &now, sizeof now) != sizeof now)
			_exit(125);
		execvp(argv[4], argv + 4);
		die(argv[4]);
	}
	close(mark[1]);
	if (read(mark[0], &now, sizeof now) != sizeof now) {
		waitpid(child, &status, 0);
		return 125;
	}
	printf("%d %lld\n", child, (long long)now.tv_sec * 1000000000 + now.tv_nsec);
	fflush(stdout);
	while (waitpid(child, &status, 0) < 0 && errno == EINTR)
		;
	return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
