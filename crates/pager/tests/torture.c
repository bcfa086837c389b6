/* A program that knows what each page of its memory must hold. It obeys one letter per line on standard input and
 * answers with one line, "ok" or what is wrong. With an argument "threads" it also has threads in calls that sleep, and
 * counts EINTR ("patient" before it: calls of minutes, not of 200 ms); with "filter" it forbids itself, on pain of death, most calls that an injection would make. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/filter.h>
#include <linux/futex.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/select.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <netinet/in.h>

#define PAGES 4096
#define WORDS 512
static uint64_t *arena;
static uint32_t *gen; /* of each page; 0: zeros */
static uint64_t data[8 * WORDS] = {1, 2, 3};
static uint64_t bss[8 * WORDS];
static int holes;
static uint64_t round_no = 1, seed = 42;
static volatile uint64_t eintr, other;

static uint64_t mix(uint64_t a, uint64_t b, uint64_t c)
{
	uint64_t x = a * 0x9e3779b97f4a7c15ull ^ b * 0xc2b2ae3d27d4eb4full ^ c;
	return (x ^ x >> 29) * 0xbf58476d1ce4e5b9ull | 1;
}
static uint64_t next(void) { return seed = mix(seed, 7, 9); }

static void put(unsigned page)
{
	gen[page] = (uint32_t)++round_no;
	for (unsigned i = 0; i < WORDS; i++)
		arena[(size_t)page * WORDS + i] = mix(page, gen[page], i);
}

static unsigned bad(void)
{
	unsigned n = 0;
	for (unsigned p = 0; p < PAGES; p++)
		for (unsigned i = 0; i < WORDS; i++)
			if (arena[(size_t)p * WORDS + i] != (gen[p] ? mix(p, gen[p], i) : 0)) {
				n++;
				break;
			}
	for (unsigned i = 3; i < 8 * WORDS; i++)
		n += data[i] != mix(1, 2, i) || bss[i] != mix(3, 4, i);
	return n;
}

/* Ends a run of pages [a, b) chosen at random. */
static void some(unsigned *a, unsigned *b)
{
	*a = next() % PAGES;
	*b = *a + 1 + next() % 64;
	if (*b > PAGES)
		*b = PAGES;
}

static void forget(unsigned a, unsigned b)
{
	while (a < b)
		gen[a++] = 0;
}

static void move(void)
{
	size_t size = (size_t)PAGES * WORDS * 8;
	/* A range of several mappings cannot be moved, and mappings that are watched do not join new ones beside them. */
	if (holes)
		return;
	void *to = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	void *got = mremap(arena, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, to);
	if (got != to)
		abort();
	arena = got;
}

static int obey(char c);
static int to_child = -1, from_child = -1;

static void spawn(void)
{
	int in[2], out[2];
	char line[8];
	if (pipe(in) || pipe(out))
		abort();
	if (fork() == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		close(in[1]);
		close(out[0]);
		while (read(in[0], line, 1) == 1) {
			int n = obey(line[0]);
			if (write(out[1], n ? "b" : "k", 1) != 1)
				_exit(1);
		}
		_exit(0);
	}
	close(in[0]);
	close(out[1]);
	to_child = in[1];
	from_child = out[0];
}

static int order_child(const char *order)
{
	char answer;
	if (to_child < 0)
		return 0;
	return write(to_child, order, 1) != 1 || read(from_child, &answer, 1) != 1 || answer != 'k';
}

static int obey(char c)
{
	unsigned a, b;
	int status;
	switch (c) {
	case 'c': return bad();
	case 'n': return 0;
	case 'w': for (some(&a, &b); a < b; a++) put(a); return 0;
	case 's': for (a = 0; a < PAGES; a += 7) put(a); return 0;
	case 'z': some(&a, &b); memset(arena + (size_t)a * WORDS, 0, (size_t)(b - a) * 4096); forget(a, b); return 0;
	case 'd': some(&a, &b); forget(a, b);
		  return madvise(arena + (size_t)a * WORDS, (size_t)(b - a) * 4096, MADV_DONTNEED);
	case 'u': some(&a, &b); forget(a, b); holes = 1;
		  munmap(arena + (size_t)a * WORDS, (size_t)(b - a) * 4096);
		  return mmap(arena + (size_t)a * WORDS, (size_t)(b - a) * 4096, PROT_READ | PROT_WRITE,
			      MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED;
	case 'm': move(); return 0;
	case 'b': { char *p = sbrk(1 << 16); memset(p, 1, 1 << 16); return p[77] != 1; }
	case 'f': {
		pid_t pid = fork();
		if (pid == 0) {
			int n = bad();
			for (a = 0; a < PAGES; a += 3) put(a);
			_exit(n || bad() ? 1 : 0);
		}
		for (a = 1; a < PAGES; a += 5) put(a);
		if (waitpid(pid, &status, 0) != pid)
			return 1;
		return status;
	}
	case 'B': /* children one behind the other, each of which looks at everything */
		for (a = 0; a < 15; a++) {
			pid_t pid = fork();
			if (pid == 0)
				_exit(bad() ? 1 : 0);
			if (waitpid(pid, &status, 0) != pid || status)
				return 1;
		}
		return 0;
	case 'x': { /* a child that executes another program */
		pid_t pid = fork();
		if (pid == 0) { execl("/bin/true", "true", (char *)NULL); _exit(1); }
		return waitpid(pid, &status, 0) != pid || status;
	}
	case 'F': if (to_child < 0) spawn(); return 0;
	case 'C': return order_child("c");
	case 'W': return order_child("s");
	case 'i': return (int)eintr;
	case 'o': return (int)other;
	}
	return 1000;
}

/* How long each of these calls waits, in milliseconds. */
static int patience = 200;

static void *sleeper(void *argument)
{
	long kind = (long)argument;
	int pipes[2], ep, sock, r;
	char byte;
	struct timespec t = {0};
	struct timeval tv = {patience / 1000, patience % 1000 * 1000};
	struct pollfd pfd;
	struct epoll_event event;
	struct sockaddr_in address = {.sin_family = AF_INET};
	uint32_t word = 0;
	if (pipe(pipes))
		abort();
	ep = epoll_create1(0);
	sock = socket(AF_INET, SOCK_STREAM, 0);
	bind(sock, (void *)&address, sizeof address);
	listen(sock, 5);
	int udp = socket(AF_INET, SOCK_DGRAM, 0);
	setsockopt(udp, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof tv);
	bind(udp, (void *)&address, sizeof address);
	for (;;) {
		fd_set set;
		FD_ZERO(&set);
		FD_SET(pipes[0], &set);
		pfd.fd = pipes[0];
		pfd.events = POLLIN;
		t = (struct timespec){patience / 1000, patience % 1000 * 1000000L};
		tv = (struct timeval){patience / 1000, patience % 1000 * 1000};
		switch (kind) {
		case 0: r = nanosleep(&t, NULL); break;
		case 1: r = poll(&pfd, 1, patience); break;
		case 2: r = epoll_wait(ep, &event, 1, patience); break;
		case 3: r = syscall(SYS_futex, &word, FUTEX_WAIT, 0, &t, NULL, 0); if (r && errno == ETIMEDOUT) r = 0; break;
		case 4: r = read(pipes[0], &byte, 1); break;
		case 5: r = select(pipes[0] + 1, &set, NULL, NULL, &tv); break;
		case 6: r = accept(sock, NULL, NULL); break;
		case 7: r = recv(udp, &byte, 1, 0); if (r < 0 && errno == EAGAIN) r = 0; break;
		case 8: { sigset_t usr; sigemptyset(&usr); sigaddset(&usr, SIGUSR1); r = sigtimedwait(&usr, NULL, &t); r = r < 0 && errno == EAGAIN ? 0 : r; break; }
		case 9: { sigset_t none; sigemptyset(&none); r = epoll_pwait(ep, &event, 1, patience, &none); break; }
		case 10: r = ppoll(&pfd, 1, &t, NULL); break;
		default: r = clock_nanosleep(CLOCK_MONOTONIC, 0, &t, NULL); if (r) { errno = r; r = -1; } break;
		}
		eintr += r < 0 && errno == EINTR;
		other += r < 0 && errno != EINTR;
	}
	return NULL;
}

static void filter(void)
{
	struct sock_filter f[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_socket, 6, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_recvmsg, 5, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_userfaultfd, 4, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_madvise, 3, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_ioctl, 2, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mprotect, 1, 0),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
	};
	struct sock_fprog program = {sizeof f / sizeof *f, f};
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
		abort();
}

int main(int argc, char **argv)
{
	char line[64];
	arena = mmap(NULL, (size_t)PAGES * WORDS * 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	gen = calloc(PAGES, sizeof *gen);
	for (unsigned p = 0; p < PAGES; p++)
		if (p % 5)
			put(p);
	for (unsigned i = 3; i < 8 * WORDS; i++)
		data[i] = mix(1, 2, i), bss[i] = mix(3, 4, i);
	for (int i = 1; i < argc; i++) {
		if (!strcmp(argv[i], "patient"))
			patience = 600000;
		if (!strcmp(argv[i], "threads"))
			for (long kind = 0; kind < 12; kind++) {
				pthread_t thread;
				pthread_create(&thread, NULL, sleeper, (void *)kind);
			}
		if (!strcmp(argv[i], "filter"))
			filter();
	}
	setvbuf(stdout, NULL, _IOLBF, 0);
	puts("ready");
	while (fgets(line, sizeof line, stdin)) {
		int n = obey(line[0]);
		if (n)
			printf("%c: %d\n", line[0], n);
		else
			puts("ok");
	}
	return 0;
}
