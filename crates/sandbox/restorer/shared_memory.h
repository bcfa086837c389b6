/* Memory that several mappings share: anonymous, a segment of System V IPC, or a memory file. Pid 1 makes and fills it at
 * SHARED; each process takes its mappings from there. Part of restorer.c. */
#ifndef KIP_RESTORER_SHARED_MEMORY_H
#define KIP_RESTORER_SHARED_MEMORY_H

static void make_shared(void)
{
    struct shared *shared = at(plan()->shared.at);
    word address = SHARED;
    for (word i = 0; i < plan()->shared.count; i++, shared++) {
        if (~shared->segment)
            attach(shared, address);
        else
            must(call6(SYS_mmap, address, shared->size, PROT_READ | PROT_WRITE,
                       MAP_SHARED | MAP_FIXED | (~shared->file ? 0 : MAP_ANONYMOUS), ~shared->file ? ours(shared->file) : -1, 0),
                 AT_SHARED, i);
        read_pages(shared->pages);
        shared->prefilled = address;
        address += (shared->size + PAGE - 1) & -PAGE;
    }
}

#endif
