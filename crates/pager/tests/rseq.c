/* Threads that do nothing but add to per-processor counters in critical sections of rseq(2), long ones, so that most stops
 * find them in one. None of them ever makes a call. The file of the first argument is shared: when its first byte is set
 * they end, and what the counters hold is compared with what each thread has added: "ok", or the two sums. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/rseq.h>

#define THREADS 4
#define PROCESSORS 1024
static struct { uint64_t value; char room[56]; } counter[PROCESSORS];
static uint64_t added[THREADS];
static volatile char *end;

static struct rseq *area(void) { return (struct rseq *)((char *)__builtin_thread_pointer() + __rseq_offset); }

/* Adds one to the counter of the processor that the thread is on; 0 if the section was aborted. */
static int add(void)
{
	struct rseq *rseq = area();
	uint32_t cpu = rseq->cpu_id_start;
	uint64_t *at = &counter[cpu % PROCESSORS].value;
	int done = 0;
	asm volatile(
		".pushsection __rseq_cs, \"aw\"\n\t.balign 32\n"
		"3:\t.long 0, 0\n\t.quad 1f, 2f - 1f, 4f\n\t.popsection\n"
		"\tleaq 3b(%%rip), %%rax\n\tmovq %%rax, %c[cs](%[rseq])\n"
		"1:\tcmpl %[cpu], %c[cpu_id](%[rseq])\n\tjne 5f\n"
		"\tmovq (%[at]), %%rcx\n\tincq %%rcx\n\tmovl $2000, %%eax\n"
		"6:\tdecl %%eax\n\tjne 6b\n"
		"\tmovq %%rcx, (%[at])\n"
		"2:\tmovl $1, %[done]\n\tjmp 5f\n"
		"\t.byte 0x0f, 0xb9, 0x3d\n\t.long 0x53053053\n"
		"4:\tmovl $0, %[done]\n"
		"5:\n"
		: [done] "+r"(done)
		: [rseq] "r"(rseq), [at] "r"(at), [cpu] "r"(cpu), [cs] "i"(offsetof(struct rseq, rseq_cs)),
		  [cpu_id] "i"(offsetof(struct rseq, cpu_id))
		: "rax", "rcx", "memory", "cc");
	return done;
}

static void *run(void *number)
{
	while (!*end)
		added[(intptr_t)number] += add();
	return NULL;
}

int main(int argc, char **argv)
{
	int fd = argc > 1 ? open(argv[1], O_RDWR) : -1;
	end = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (end == MAP_FAILED || !__rseq_size) {
		printf("no shared file, or no rseq\n");
		return 1;
	}
	printf("ready\n");
	fflush(stdout);
	pthread_t threads[THREADS];
	for (intptr_t i = 1; i < THREADS; i++)
		pthread_create(&threads[i], NULL, run, (void *)i);
	run((void *)0);
	uint64_t all = 0, have = 0;
	for (int i = 1; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	for (int i = 0; i < THREADS; i++)
		all += added[i];
	for (int i = 0; i < PROCESSORS; i++)
		have += counter[i].value;
	if (all == have && all)
		printf("ok\n");
	else
		printf("added %lu, have %lu\n", all, have);
	return 0;
}
