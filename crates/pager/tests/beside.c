// Threads that read, give up and move pages of one mapping, whose userfaultfd the test holds: it
// takes that descriptor over and serves it in the kernel's place.
//
// Prints "FD START TO". For each line it makes a thread, which prints "begin TID":
//   r ADDRESS          reads the byte there, and prints "VALUE"
//   d ADDRESS LENGTH   gives the pages up (MADV_DONTNEED), and prints "0"
//   m FROM TO LENGTH   moves the pages (mremap), and prints "0"
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { PAGES = 16, PAGE = 4096 };

static char *map(void)
{
	char *at = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	return at == MAP_FAILED ? (perror("mmap"), exit(1), NULL) : at;
}

static void *act(void *line)
{
	unsigned long a = 0, b = 0, c = 0;
	char letter = 0;
	dprintf(1, "begin %ld\n", syscall(SYS_gettid));
	sscanf(line, "%c %lu %lu %lu", &letter, &a, &b, &c);
	int value = 0;
	if (letter == 'r')
		value = *(volatile unsigned char *)a;
	else if (letter == 'd')
		value = madvise((void *)a, b, MADV_DONTNEED);
	else if (letter == 'm')
		value = mremap((void *)a, c, c, MREMAP_MAYMOVE | MREMAP_FIXED, (void *)b) == MAP_FAILED;
	dprintf(1, "%d\n", value);
	free(line);
	return NULL;
}

int main(void)
{
	prctl(PR_SET_PDEATHSIG, 9);
	int device = open("/dev/userfaultfd", O_RDWR | O_CLOEXEC);
	int fd = ioctl(device, USERFAULTFD_IOC_NEW, O_CLOEXEC | O_NONBLOCK);
	struct uffdio_api api = { .api = UFFD_API, .features = UFFD_FEATURE_EVENT_REMAP | UFFD_FEATURE_EVENT_REMOVE
		| UFFD_FEATURE_EVENT_UNMAP | UFFD_FEATURE_PAGEFAULT_FLAG_WP | UFFD_FEATURE_THREAD_ID };
	char *start = map(), *to = map();
	struct uffdio_register range = { .range = { (unsigned long)start, PAGES * PAGE },
		.mode = UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_WP };
	if (ioctl(fd, UFFDIO_API, &api) || ioctl(fd, UFFDIO_REGISTER, &range)) {
		perror("userfaultfd");
		return 1;
	}
	dprintf(1, "%d %lu %lu\n", fd, (unsigned long)start, (unsigned long)to);
	char line[128];
	while (fgets(line, sizeof line, stdin)) {
		pthread_t thread;
		pthread_create(&thread, NULL, act, strdup(line));
		pthread_detach(thread);
	}
	return 0;
}
