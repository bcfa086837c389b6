/* The way between a client and a server, as long as it is asked to be: a relay that delays what passes, for this kernel may
 * have no netem.
 *
 *   distance PROTO HOST PORT ROUND_TRIP_US      says its port on 127.0.0.1, then relays until it is killed, or its parent ends
 *
 * A client that connects here is connected at once; over a real way its SYN, the answer and its first bytes would take a round
 * trip and a half to the server's accept(2). So the server is dialled that late, and gets what the client has sent until then.
 * From then on each byte takes half a round trip, in both directions; a datagram always does. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 1 << 16, AT_ONCE = 4 };

/* What passes, and when it arrives; of length 0: the end. */
struct piece {
	struct piece *next;
	long long due;
	struct sockaddr_in client; /* of a datagram: where its answer goes */
	ssize_t length;
	char bytes[];
};

/* One direction. */
struct way {
	int from, to, ended;
	struct piece *first, **last;
};

static long long half_ns;
static struct sockaddr_in server;

static long long now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (long long)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void sleep_until(long long ns)
{
	struct timespec t = { ns / 1000000000, ns % 1000000000 };
	while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR)
		;
}

static void die(const char *what)
{
	perror(what);
	exit(1);
}

/* Takes what has come into the queue. Returns 0 at the end. */
static int take(struct way *w, long long due, int flags, struct sockaddr_in *client)
{
	static char buffer[MOST];
	socklen_t size = sizeof *client;
	ssize_t n = recvfrom(w->from, buffer, sizeof buffer, flags, (struct sockaddr *)client, client ? &size : NULL);
	if (n < 0 && (errno == EAGAIN || errno == EINTR || errno == ECONNREFUSED))
		return 1; /* a refused datagram is a lost one */
	n = n < 0 ? 0 : n;
	struct piece *p = malloc(sizeof *p + n);
	if (!p)
		die("malloc");
	memcpy(p->bytes, buffer, n);
	p->next = NULL, p->due = due, p->length = n;
	if (client)
		p->client = *client;
	*w->last = p, w->last = &p->next;
	return n != 0;
}

static struct piece *pop(struct way *w)
{
	struct piece *p = w->first;
	if (!(w->first = p->next))
		w->last = &w->first;
	return p;
}

/* Waits for the next arrival or for what comes at one of the two. */
static void wait_for_either(struct way ways[2], struct pollfd polled[2])
{
	long long due = -1, now = now_ns();
	for (int i = 0; i < 2; i++) {
		polled[i] = (struct pollfd) { ways[i].ended ? -1 : ways[i].from, POLLIN, 0 };
		if (ways[i].first && (due < 0 || ways[i].first->due < due))
			due = ways[i].first->due;
	}
	long long left = due < now ? 0 : due - now;
	struct timespec until = { left / 1000000000, left % 1000000000 };
	ppoll(polled, 2, due < 0 ? NULL : &until, NULL);
}

static void send_all(int fd, const char *bytes, ssize_t length)
{
	for (ssize_t n; length > 0; bytes += n, length -= n)
		if ((n = send(fd, bytes, length, MSG_NOSIGNAL)) < 0)
			return; /* it has hung up, which its own direction tells */
}

static void relay_stream(int client)
{
	long long accepted = now_ns();
	int one = 1, upstream = socket(AF_INET, SOCK_STREAM, 0);
	sleep_until(accepted + 3 * half_ns);
	if (connect(upstream, (struct sockaddr *)&server, sizeof server)) { /* as the client would find, a little earlier */
		close(client);
		close(upstream);
		return;
	}
	setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
	setsockopt(upstream, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
	struct way ways[2] = { { client, upstream, 0, NULL, NULL }, { upstream, client, 0, NULL, NULL } };
	struct pollfd polled[2];
	for (int i = 0; i < 2; i++)
		ways[i].last = &ways[i].first;
	ways[0].ended = !take(&ways[0], now_ns(), MSG_DONTWAIT, NULL);
	while (!ways[0].ended || !ways[1].ended || ways[0].first || ways[1].first) {
		wait_for_either(ways, polled);
		for (int i = 0; i < 2; i++) {
			if (polled[i].revents)
				ways[i].ended = !take(&ways[i], now_ns() + half_ns, MSG_DONTWAIT, NULL);
			while (ways[i].first && ways[i].first->due <= now_ns()) {
				struct piece *p = pop(&ways[i]);
				if (p->length)
					send_all(ways[i].to, p->bytes, p->length);
				else
					shutdown(ways[i].to, SHUT_WR);
				free(p);
			}
		}
	}
	close(client);
	close(upstream);
}

/* One client at a time: an answer goes to the client that has sent the newest datagram. */
static void relay_datagrams(int listener)
{
	int upstream = socket(AF_INET, SOCK_DGRAM, 0);
	struct sockaddr_in client = { 0 };
	if (connect(upstream, (struct sockaddr *)&server, sizeof server))
		die("connect");
	struct way ways[2] = { { listener, upstream, 0, NULL, NULL }, { upstream, listener, 0, NULL, NULL } };
	struct pollfd polled[2];
	for (int i = 0; i < 2; i++)
		ways[i].last = &ways[i].first;
	for (;;) {
		wait_for_either(ways, polled);
		for (int i = 0; i < 2; i++) {
			if (polled[i].revents)
				take(&ways[i], now_ns() + half_ns, MSG_DONTWAIT, i ? NULL : &client);
			while (ways[i].first && ways[i].first->due <= now_ns()) {
				struct piece *p = pop(&ways[i]);
				if (i)
					sendto(listener, p->bytes, p->length, 0, (struct sockaddr *)&client, sizeof client);
				else
					send(upstream, p->bytes, p->length, 0);
				free(p);
			}
		}
	}
}

int main(int argc, char **argv)
{
	if (argc != 5) {
		fprintf(stderr, "usage: distance tcp|udp HOST PORT ROUND_TRIP_US\n");
		return 2;
	}
	int udp = !strcmp(argv[1], "udp"), listener = socket(AF_INET, udp ? SOCK_DGRAM : SOCK_STREAM, 0);
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t size = sizeof address;
	server = (struct sockaddr_in) { .sin_family = AF_INET, .sin_port = htons(atoi(argv[3])) };
	half_ns = atoll(argv[4]) * 500;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	prctl(PR_SET_TIMERSLACK, 1);
	if (inet_pton(AF_INET, argv[2], &server.sin_addr) != 1 || bind(listener, (struct sockaddr *)&address, sizeof address))
		die(argv[2]);
	if (!udp && listen(listener, 128))
		die("listen");
	getsockname(listener, (struct sockaddr *)&address, &size);
	printf("%d\n", ntohs(address.sin_port));
	fflush(stdout);
	if (udp)
		relay_datagrams(listener);
	/* Made ahead: to make one when a client comes would add to the way. */
	for (int i = 0; i < AT_ONCE; i++) {
		if (fork())
			continue;
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		for (;;) {
			int client = accept(listener, NULL, NULL);
			if (client >= 0)
				relay_stream(client);
		}
	}
	for (;;)
		pause();
}
