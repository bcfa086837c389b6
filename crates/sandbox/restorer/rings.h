/* Rings of asynchronous I/O, io_setup(2). The kernel keeps to itself how far it has got in one, and begins at the start of a new one:
 * which is as good where every event of the old one has been taken. Source: the kernel's fs/aio.c. */
#ifndef KIP_RESTORER_RINGS_H
#define KIP_RESTORER_RINGS_H

/* Of struct aio_ring, in 32-bit words. */
enum { RING_EVENTS = 1, RING_HEAD = 2, RING_TAIL = 3, RING_WORDS = 4 };

/* After all other mappings, for the kernel chooses where a new ring lies. */
static void make_rings(struct task *task)
{
    struct ring *ring = at(task->rings.at);
    for (word i = 0; i < task->rings.count; i++, ring++) {
        u32 was[RING_WORDS];
        struct vector vector = { (word)was, sizeof was };
        word context = 0;
        long got = must(call5(SYS_preadv, ours(ring->ours), &vector, 1, ring->position, 0), AT_RING, ring->address);
        if (got != sizeof was || was[RING_HEAD] != was[RING_TAIL])
            fail(AT_RING, -EBUSY, ring->address);
        must(call2(SYS_io_setup, ring->requests, &context), AT_RING, ring->address);
        if (((u32 *)context)[RING_EVENTS] != was[RING_EVENTS])
            fail(AT_RING, -EINVAL, ring->address);
        /* It may lie where a part of it has to be. */
        must(call5(SYS_mremap, context, ring->length, ring->length, MREMAP_MAYMOVE | MREMAP_FIXED, COPY), AT_RING, ring->address);
        must(call5(SYS_mremap, COPY, ring->length, ring->length, MREMAP_MAYMOVE | MREMAP_FIXED, ring->address), AT_RING, ring->address);
    }
}

#endif
