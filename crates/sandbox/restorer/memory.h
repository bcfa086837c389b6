/* The memory of a process. A part of restorer.c, whose `at`, `must`, `ours` and `plan` it uses. */
#ifndef KIP_RESTORER_MEMORY_H
#define KIP_RESTORER_MEMORY_H

/* Whatever is there but our area. */
static void unmap_all(void)
{
    must(call2(SYS_munmap, PAGE, AREA - PAGE), AT_START, 3);
    must(call2(SYS_munmap, AREA_END, USER_END - AREA_END), AT_START, 4);
}

/* Some of the task's memory comes later: the process that gets this descriptor will see to it. */
static void let_be_watched(struct task *task)
{
    if (!~task->device)
        return;
    struct said said = { WORD_LAZY, task_now, 0, 0, 0 };
    struct {
        word size;
        int level, type;
        int fd, pad;
    } control = { 16 + 4, SOL_SOCKET, SCM_RIGHTS, 0, 0 };
    control.fd = (int)must(call3(SYS_ioctl, ours(task->device), USERFAULTFD_IOC_NEW, O_CLOEXEC | O_NONBLOCK), AT_LAZY, 0);
    struct vector vector = { (word)&said, sizeof said };
    struct message message = { 0, 0, 0, &vector, 1, &control, sizeof control, 0, 0 };
    long sent;
    do
        sent = call3(SYS_sendmsg, socket_at, &message, 0);
    while (sent == -EINTR);
    must(sent, AT_LAZY, 1);
    call1(SYS_close, control.fd);
}

static void make_mappings(struct task *task, word made)
{
    struct mapping *m = at(task->mappings.at);
    for (word i = 0; i < task->mappings.count; i++, m++) {
        if (m->kind == MAPPING_GUARD || m->made != made)
            continue;
        word protection = m->written ? m->protection | PROT_WRITE : m->protection, length = m->end - m->start;
        if (m->kind == MAPPING_SHARED) {
            struct shared *shared = (struct shared *)at(plan()->shared.at) + m->ours;
            /* An old size of 0 makes another mapping of the same shared memory. */
            must(call5(SYS_mremap, shared->prefilled + m->offset, 0, length, MREMAP_MAYMOVE | MREMAP_FIXED, m->start), AT_MAP,
                 m->start);
            if (m->protection != (shared->how & SHARED_READ_ONLY ? PROT_READ : PROT_READ | PROT_WRITE))
                must(call3(SYS_mprotect, m->start, length, m->protection), AT_PROTECT, m->start);
            continue;
        }
        int fd = m->flags & MAP_ANONYMOUS ? -1 : ours(m->ours);
        must(call6(SYS_mmap, m->start, length, protection, m->flags | MAP_FIXED, fd, m->offset), AT_MAP, m->start);
    }
}

static void map_memory(struct task *task)
{
    make_mappings(task, MADE_ALONE);
    make_rings(task);
    let_be_watched(task);
    /* A fault for each page would take longer than to read it. */
    struct vector *run = at(task->populate.at);
    for (word i = 0; i < task->populate.count; i++, run++)
        call3(SYS_madvise, run->base, run->length, MADV_POPULATE_WRITE);
    read_pages(task->pages);
    struct mapping *m = at(task->mappings.at);
    for (word i = 0; i < task->mappings.count; i++, m++) {
        if (m->kind == MAPPING_GUARD)
            must(call3(SYS_madvise, m->start, m->end - m->start, MADV_GUARD_INSTALL), AT_PROTECT, m->start);
        if (m->kind == MAPPING_PLAIN && m->written && !(m->protection & PROT_WRITE))
            must(call3(SYS_mprotect, m->start, m->end - m->start, m->protection), AT_PROTECT, m->start);
        for (word advice = 0; m->advice >> advice; advice++)
            if (m->advice >> advice & 1)
                must(call3(SYS_madvise, m->start, m->end - m->start, advice), AT_PROTECT, m->start);
    }
    struct piece *piece = at(task->vdso.at);
    word from = VDSO;
    for (word i = 0; i < task->vdso.count; i++, piece++) {
        must(call5(SYS_mremap, from, piece->size, piece->size, MREMAP_MAYMOVE | MREMAP_FIXED, piece->target), AT_VDSO, i);
        from += piece->size;
    }
}

#endif
