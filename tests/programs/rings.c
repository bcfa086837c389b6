/* Rings of asynchronous I/O, io_setup(2): a small one, whose events the main thread takes, and a large one, in which another thread waits.
 *
 * Answers each line on a connection to port 7000: "check" with "ok" or what is wrong, after requests to both; "leave" with "ok" when an
 * event waits in the small one; "take" with "ok" when that has been taken. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "listen.h"

#define SIZE 4096
#define AT_ONCE 5
#define WITHIN_MS 5000

static aio_context_t small, large;
static int file, told[2], round_now;
static const char *wrong;

static void expect(int good, const char *what)
{
	if (!good)
		wrong = what;
}

static void submit(aio_context_t ring, int what, char *buffer, long place, unsigned long data)
{
	struct iocb block = { .aio_lio_opcode = what, .aio_fildes = file, .aio_buf = (unsigned long)buffer, .aio_nbytes = SIZE,
			      .aio_offset = place * SIZE, .aio_data = data };
	struct iocb *list = &block;
	expect(syscall(SYS_io_submit, ring, 1, &list) == 1, "io_submit");
}

static void take(unsigned long data)
{
	struct io_event event;
	struct timespec within = { WITHIN_MS / 1000, 0 };
	expect(syscall(SYS_io_getevents, small, 1, 1, &event, &within) == 1, "no event");
	expect(event.data == data && event.res == SIZE, "another event");
}

static void *wait_for_events(void *unused)
{
	(void)unused;
	for (;;) {
		struct io_event event;
		if (syscall(SYS_io_getevents, large, 1, 1, &event, NULL) != 1)
			_exit(3);
		if (write(told[1], &event.data, sizeof event.data) < 0)
			_exit(4);
	}
}

static void check(void)
{
	static char written[AT_ONCE][SIZE], buffer[SIZE];
	struct pollfd news = { told[0], POLLIN, 0 };
	unsigned long data = 0;
	round_now++;
	for (int i = 0; i < AT_ONCE; i++) {
		memset(written[i], round_now + i, SIZE);
		submit(small, IOCB_CMD_PWRITE, written[i], i, 100 * round_now + i);
	}
	for (int i = 0; i < AT_ONCE; i++)
		take(100 * round_now + i);
	submit(large, IOCB_CMD_PREAD, buffer, round_now % AT_ONCE, round_now);
	expect(poll(&news, 1, WITHIN_MS) == 1 && read(told[0], &data, sizeof data) == sizeof data, "the other thread has no event");
	expect(data == (unsigned long)round_now, "the other thread has another event");
	expect(!memcmp(buffer, written[round_now % AT_ONCE], SIZE), "what was written is not read");
}

int main(void)
{
	static char left[SIZE];
	pthread_t thread;
	file = open("/tmp/rings", O_RDWR | O_CREAT, 0600);
	if (file < 0 || pipe(told) || syscall(SYS_io_setup, AT_ONCE, &small) || syscall(SYS_io_setup, 700, &large))
		return 2;
	pthread_create(&thread, NULL, wait_for_events, NULL);
	int listener = listen_7000();
	for (;;) {
		FILE *client = fdopen(accept(listener, NULL, NULL), "r+");
		char line[100];
		while (fgets(line, sizeof line, client)) {
			wrong = NULL;
			if (!strncmp(line, "leave", 5))
				submit(small, IOCB_CMD_PWRITE, left, AT_ONCE, 7);
			else if (!strncmp(line, "take", 4))
				take(7);
			else
				check();
			fseek(client, 0, SEEK_CUR);
			fprintf(client, "%s\n", wrong ? wrong : "ok");
			fflush(client);
		}
		fclose(client);
	}
}
