/* Picocenter's strawman application (paper P, section 6.4): a block of memory of N pages, of which each request accesses
 * M < N.
 *
 *   strawman PORT N [SEED]  serves requests "GET /FIRST/M": reads a word of M pages from page FIRST on, around the end, and
 *                           answers with their sum, which is right only if each page is what it was at the start;
 *                           "GET /FIRST/M/ADD" adds ADD to each of these words before. With another SEED the rest of each
 *                           page is other noise
 *
 * The client says what is accessed, so that one program does for all M and all shifts. */
#include <arpa/inet.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

enum { PAGE = 4096 };

static void fill(unsigned char *memory, long pages, uint64_t seed)
{
	uint64_t x = 88172645463325252u ^ seed << 1; /* xorshift64: no page is like another, and none is zero */
	for (long i = 0; i < pages; i++) {
		for (int word = 1; word < PAGE / 8; word++) {
			x ^= x << 13, x ^= x >> 7, x ^= x << 17;
			memcpy(memory + i * PAGE + word * 8, &x, 8);
		}
		uint64_t own = (uint64_t)i * i + 1;
		memcpy(memory + i * PAGE, &own, 8);
	}
}

static int answer(int client, unsigned char *memory, long pages)
{
	char request[4096], body[32], reply[256];
	ssize_t length = 0, got;
	do {
		if ((got = read(client, request + length, sizeof request - 1 - length)) <= 0)
			return -1;
		length += got;
		request[length] = 0;
	} while (!strstr(request, "\r\n\r\n") && length < (ssize_t)sizeof request - 1);
	long first, count, add = 0;
	if (sscanf(request, "GET /%ld/%ld/%ld ", &first, &count, &add) < 2 || first < 0 || count < 0 || count > pages)
		return -1;
	uint64_t sum = 0;
	for (long i = 0; i < count; i++) {
		uint64_t word;
		unsigned char *page = memory + (first + i) % pages * PAGE;
		memcpy(&word, page, 8);
		sum += word += add;
		if (add)
			memcpy(page, &word, 8);
	}
	int size = snprintf(body, sizeof body, "%llu", (unsigned long long)sum);
	int all = snprintf(reply, sizeof reply, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s", size, body);
	return write(client, reply, all) == all ? 0 : -1;
}

int main(int argc, char **argv)
{
	if (argc != 3 && argc != 4) {
		fprintf(stderr, "usage: strawman PORT PAGES [SEED]\n");
		return 2;
	}
	long pages = atol(argv[2]);
	unsigned char *memory = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED) {
		perror("strawman: mmap");
		return 1;
	}
	madvise(memory, pages * PAGE, MADV_NOHUGEPAGE); /* pages are what is counted */
	fill(memory, pages, argc > 3 ? strtoull(argv[3], NULL, 10) : 0);
	int listener = socket(AF_INET, SOCK_STREAM, 0), yes = 1;
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(atoi(argv[1])) };
	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
	if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 128)) {
		perror("strawman: listen");
		return 1;
	}
	for (;;) {
		int client = accept(listener, NULL, NULL);
		if (client < 0)
			continue;
		answer(client, memory, pages);
		close(client);
	}
}
