/* The client of the measurements: quick enough not to be what is measured, and sure that each reply is the right one.
 *
 *   client [NETNS]          stands in that network namespace, reads commands from standard input, answers each by a line
 *
 * Commands (words by single blanks; REQUEST and what EXPECT carries are in hexadecimal):
 *   first PROTO HOST PORT REQUEST EXPECT RETRY_US TIMEOUT_MS
 *       The first complete reply. With RETRY_US 0 there is one connection, and whatever goes wrong with it is an error;
 *       else a new one is tried so often until one is answered, those still waiting being left to wait.
 *       "ok CONNECT_NS REPLY_NS ATTEMPTS": CLOCK_MONOTONIC before connect(2) of the answered one, and after its last byte.
 *   load PROTO HOST PORT REQUEST EXPECT CONNECTIONS KEEP MS
 *       That many closed loops for that long; KEEP 0: a new connection for each request.
 *       "ok REPLIES ERRORS NS".
 * PROTO is tcp or udp. EXPECT: exact:BYTES; http:BODY (status 200 and a Content-Length); page:BYTES (the same with a body
 * that begins so); dns:BYTES (a good answer to our query that ends so); line:BYTES (a line that begins so; the server speaks first if REQUEST is "-").
 * A wrong reply is "error WHY". */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 512, BUFFER = 1 << 16, PENDING_TCP = 64, PENDING_UDP = 256, ANSWER_WAIT_NS = 1000000000 };
enum kind { EXACT, HTTP, PAGE, DNS, LINE };
enum verdict { MORE, GOOD, BAD };

struct target {
	struct sockaddr_in address;
	int udp;
	unsigned char request[4096], expect[BUFFER];
	int request_length, expect_length;
	enum kind kind;
};

struct connection {
	int fd; /* -1: none */
	int sent, length;
	int connected;
	long served; /* requests answered on this connection */
	long long since;
	char *buffer;
};

static struct connection connections[MOST];
static char why[256];

static long long now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (long long)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int from_hex(const char *text, unsigned char *out, int most)
{
	int n = 0;
	if (!strcmp(text, "-"))
		return 0;
	for (; text[0] && text[1] && n < most; text += 2) {
		unsigned byte;
		if (sscanf(text, "%2x", &byte) != 1)
			return -1;
		out[n++] = byte;
	}
	return n;
}

static int parse(struct target *t, const char *proto, const char *host, int port, const char *request, char *expect)
{
	char *colon = strchr(expect, ':');
	memset(t, 0, sizeof *t);
	t->udp = !strcmp(proto, "udp");
	t->address.sin_family = AF_INET;
	t->address.sin_port = htons(port);
	if (inet_pton(AF_INET, host, &t->address.sin_addr) != 1 || !colon)
		return -1;
	*colon = 0;
	t->kind = !strcmp(expect, "http") ? HTTP : !strcmp(expect, "page") ? PAGE : !strcmp(expect, "dns") ? DNS :
		  !strcmp(expect, "line") ? LINE : EXACT;
	t->request_length = from_hex(request, t->request, sizeof t->request);
	t->expect_length = from_hex(colon + 1, t->expect, sizeof t->expect);
	return t->request_length < 0 || t->expect_length < 0 ? -1 : 0;
}

static enum verdict bad(const char *text, const char *buffer, int length)
{
	char shown[81];
	int n = 0;
	for (; n < length && n < 80; n++)
		shown[n] = buffer[n] >= ' ' && buffer[n] < 127 ? buffer[n] : '.';
	shown[n] = 0;
	snprintf(why, sizeof why, "%s: %d bytes: %s", text, length, shown);
	return BAD;
}

static enum verdict judge_http(const struct target *t, const char *b, int length)
{
	const char *end = memmem(b, length, "\r\n\r\n", 4), *field;
	long body;
	if (!end)
		return MORE;
	if (length < 12 || memcmp(b, "HTTP/1.", 7) || memcmp(b + 8, " 200", 4))
		return bad("not a 200", b, length);
	field = strcasestr(b, "\r\nContent-Length:");
	if (!field || field > end)
		return bad("no Content-Length", b, length);
	body = strtol(field + 17, NULL, 10);
	end += 4;
	if (length - (end - b) < body)
		return MORE;
	if (t->kind == PAGE ? body < t->expect_length : body != t->expect_length)
		return bad("not as long as the page", b, length);
	if (memcmp(end, t->expect, t->expect_length))
		return bad("not the page", b, length);
	return GOOD;
}

/* Of RFC 1035, section 4.1.1. */
static const char *const codes[16] = {
	"not the answer", "FORMERR", "SERVFAIL", "NXDOMAIN", "NOTIMP", "REFUSED", "code 6", "code 7",
	"code 8", "code 9", "code 10", "code 11", "code 12", "code 13", "code 14", "code 15",
};

static enum verdict judge(const struct target *t, const struct connection *c)
{
	const char *b = c->buffer;
	int n = c->length, e = t->expect_length;
	switch (t->kind) {
	case HTTP:
	case PAGE:
		return judge_http(t, b, n);
	case DNS:
		if (n < 12 || memcmp(b, t->request, 2) || !(b[2] & 0x80) || (b[3] & 15) || n < e || memcmp(b + n - e, t->expect, e))
			return bad(n < 12 ? "no answer" : codes[b[3] & 15], b, n);
		return GOOD;
	case LINE:
		if (n && memcmp(b, t->expect, n < e ? n : e))
			return bad("not the line", b, n);
		return n > e && b[n - 1] == '\n' ? GOOD : MORE;
	default:
		if (n > e || memcmp(b, t->expect, n))
			return bad("not the reply", b, n);
		return n == e ? GOOD : MORE;
	}
}

/* Closing takes it out of the epoll set, and leaves no TIME_WAIT behind that would use up the ports. */
static void drop(struct connection *c)
{
	struct linger now = { 1, 0 };
	if (c->fd < 0)
		return;
	setsockopt(c->fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
	close(c->fd);
	c->fd = -1;
}

/* Begins to connect; what fails at once fails the connection. */
static int dial(struct connection *c, const struct target *t, int poll)
{
	struct epoll_event event = { EPOLLIN | EPOLLOUT | EPOLLET, { .u32 = c - connections } };
	int one = 1;
	c->sent = c->length = c->served = c->connected = 0;
	c->fd = socket(AF_INET, (t->udp ? SOCK_DGRAM : SOCK_STREAM) | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	if (c->fd < 0)
		return -1;
	if (!t->udp)
		setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
	c->since = now_ns();
	if (connect(c->fd, (const void *)&t->address, sizeof t->address) && errno != EINPROGRESS) {
		snprintf(why, sizeof why, "connect: %s", strerror(errno));
		close(c->fd);
		c->fd = -1;
		return -1;
	}
	return epoll_ctl(poll, EPOLL_CTL_ADD, c->fd, &event);
}

/* Sends what is to be sent and reads what has come. */
static enum verdict advance(struct connection *c, const struct target *t)
{
	while (c->sent < t->request_length) {
		ssize_t n = send(c->fd, t->request + c->sent, t->request_length - c->sent, MSG_NOSIGNAL);
		if (n < 0 && (errno == EAGAIN || errno == ENOTCONN))
			break;
		if (n < 0)
			return snprintf(why, sizeof why, "send: %s", strerror(errno)), BAD;
		c->sent += n;
	}
	for (;;) {
		ssize_t n = recv(c->fd, c->buffer + c->length, BUFFER - 1 - c->length, 0);
		enum verdict v;
		if (n < 0 && errno == EAGAIN)
			return MORE;
		if (n < 0)
			return snprintf(why, sizeof why, "receive: %s", strerror(errno)), BAD;
		if (n == 0)
			return bad("closed early", c->buffer, c->length);
		c->length += n;
		c->buffer[c->length] = 0;
		v = judge(t, c);
		if (v != MORE)
			return v;
	}
}

static struct connection *free_one(int most)
{
	for (int i = 0; i < most; i++)
		if (connections[i].fd < 0)
			return &connections[i];
	return NULL;
}

/* The one that has waited longest for its handshake: its SYN may have been dropped, and would come again only after a
 * second. A client that tries as often as ours has no use for it. */
static struct connection *oldest_unconnected(int most)
{
	struct connection *found = NULL;
	for (int i = 0; i < most; i++)
		if (!connections[i].connected && (!found || connections[i].since < found->since))
			found = &connections[i];
	return found;
}

static void drop_all(void)
{
	for (int i = 0; i < MOST; i++)
		drop(&connections[i]);
}

/* The first reply that is complete and right. While a server starts it may give wrong ones: with retries only the last
 * one counts as an error. */
static void first(const struct target *t, long long retry_ns, long long timeout_ns)
{
	int poll = epoll_create1(EPOLL_CLOEXEC), most = retry_ns ? t->udp ? PENDING_UDP : PENDING_TCP : 1, attempts = 0;
	long long begun = now_ns(), next = begun, done;
	struct epoll_event events[64];

	snprintf(why, sizeof why, "no reply");
	for (;;) {
		long long now = now_ns();
		struct connection *c;
		if (now - begun > timeout_ns) {
			drop_all();
			printf("error not in %lld ms, last: %s\n", timeout_ns / 1000000, why);
			break;
		}
		if (now >= next && retry_ns && !free_one(most) && (c = oldest_unconnected(most)))
			drop(c);
		if (now >= next && (c = free_one(most))) {
			attempts++;
			next = retry_ns ? now + retry_ns : now + timeout_ns * 2;
			if (dial(c, t, poll) && !retry_ns) {
				printf("error %s\n", why);
				break;
			}
		}
		now = now_ns();
		long long wait = next - now;
		struct timespec until = { wait > 0 ? wait / 1000000000 : 0, wait > 0 ? wait % 1000000000 : 0 };
		if (wait <= 0 && !free_one(most))
			until.tv_nsec = 200000;
		if (until.tv_sec > 1)
			until.tv_sec = 1;
		int n = epoll_pwait2(poll, events, 64, &until, NULL);
		for (int i = 0; i < n; i++) {
			c = &connections[events[i].data.u32];
			if (c->fd < 0)
				continue;
			c->connected |= !(events[i].events & (EPOLLERR | EPOLLHUP)) && !t->udp;
			enum verdict v = advance(c, t);
			done = now_ns();
			if (v == GOOD) {
				printf("ok %lld %lld %d\n", c->since, done, attempts);
				drop_all();
				close(poll);
				return;
			}
			if (v == BAD) {
				drop(c);
				if (!retry_ns) {
					printf("error %s\n", why);
					close(poll);
					return;
				}
			}
		}
	}
	close(poll);
}

static void load(const struct target *t, int count, int keep, long long time_ns)
{
	int poll = epoll_create1(EPOLL_CLOEXEC);
	long long begun = now_ns(), end = begun + time_ns, now = begun, looked = begun;
	long replies = 0, errors = 0;
	struct epoll_event events[MOST];

	for (int i = 0; i < count; i++)
		if (dial(&connections[i], t, poll))
			errors++;
	while ((now = now_ns()) < end && errors < 1000) {
		int n = epoll_wait(poll, events, MOST, 50);
		for (int i = 0; i < n; i++) {
			struct connection *c = &connections[events[i].data.u32];
			enum verdict v = c->fd < 0 ? MORE : advance(c, t);
			while (v == GOOD && keep) {
				replies++;
				c->served++;
				c->sent = c->length = 0;
				c->since = now;
				v = advance(c, t);
			}
			if (v == MORE)
				continue;
			if (v == GOOD)
				replies++;
			else if (!c->served || c->length)
				errors++; /* else the server has had enough requests by this connection, as it may */
			drop(c);
			if (dial(c, t, poll))
				errors++;
		}
		if (now - looked > 100000000) {
			looked = now;
			/* A datagram may be lost, and a server may forget a client: either is an error, and the loop goes on. */
			for (int i = 0; i < count; i++) {
				struct connection *c = &connections[i];
				if (c->fd >= 0 && now - c->since < ANSWER_WAIT_NS)
					continue;
				errors += c->fd >= 0;
				drop(c);
				dial(c, t, poll);
			}
		}
	}
	now = now_ns();
	drop_all();
	close(poll);
	if (errors && !replies)
		printf("error %s\n", why);
	else
		printf("ok %ld %ld %lld\n", replies, errors, now - begun);
}

int main(int argc, char **argv)
{
	static char line[1 << 18];
	static struct target target;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (argc > 1) {
		int net = open(argv[1], O_RDONLY | O_CLOEXEC);
		if (net < 0 || setns(net, CLONE_NEWNET)) {
			perror(argv[1]);
			return 1;
		}
	}
	for (int i = 0; i < MOST; i++) {
		connections[i].fd = -1;
		connections[i].buffer = malloc(BUFFER);
		memset(connections[i].buffer, 0, BUFFER);
	}
	while (fgets(line, sizeof line, stdin)) {
		char *word[10];
		int n = 0;
		for (char *w = strtok(line, " \n"); w && n < 10; w = strtok(NULL, " \n"))
			word[n++] = w;
		if (n < 8 || parse(&target, word[1], word[2], atoi(word[3]), word[4], word[5]))
			printf("error a command that I do not understand\n");
		else if (!strcmp(word[0], "first"))
			first(&target, atoll(word[6]) * 1000, atoll(word[7]) * 1000000);
		else if (n == 9)
			load(&target, atoi(word[6]) < MOST ? atoi(word[6]) : MOST, atoi(word[7]), atoll(word[8]) * 1000000);
		fflush(stdout);
	}
	return 0;
}
