/* System V IPC, sysvipc(7): what is in the plan is made in a new namespace, by its numbers. Source: the man pages; proc(5) of
 * /proc/sys/kernel/shm_next_id; the kernel's include/uapi/asm-generic/{ipcbuf,msgbuf}.h. */
#ifndef KIP_RESTORER_SYSTEM_V_H
#define KIP_RESTORER_SYSTEM_V_H

/* Of struct ipc64_perm in 32-bit words, and of struct msqid64_ds in words. */
enum { PERM_UID = 1, PERM_GID = 2, PERM_MODE = 5, QUEUE_MOST = 11 };

static void write_setting(struct setting *setting, word step)
{
    long fd = must(call4(SYS_openat, AT_FDCWD, at(setting->path), O_WRONLY | O_CLOEXEC, 0), step, setting->path);
    must(call3(SYS_write, fd, at(setting->text), setting->length), step, setting->path);
    call1(SYS_close, fd);
}

/* The kernel takes the creator from the effective ids. */
static void act_as(word user, word group)
{
    must(call3(SYS_setresgid, -1, group, -1), AT_SYSTEM_V, group);
    must(call3(SYS_setresuid, -1, user, -1), AT_SYSTEM_V, user);
}

static void act_as_root(void)
{
    must(call3(SYS_setresuid, -1, 0, -1), AT_SYSTEM_V, 0);
    must(call3(SYS_setresgid, -1, 0, -1), AT_SYSTEM_V, 0);
}

static long make_object(struct object *object, word flags)
{
    switch (object->kind) {
    case OBJECT_SEGMENT:
        return call3(SYS_shmget, object->key, object->size, flags);
    case OBJECT_SEMAPHORES:
        return call3(SYS_semget, object->key, object->size, flags);
    default:
        return call2(SYS_msgget, object->key, flags);
    }
}

static long control(struct object *object, word command, void *about)
{
    switch (object->kind) {
    case OBJECT_SEGMENT:
        return call3(SYS_shmctl, object->id, command, about);
    case OBJECT_SEMAPHORES:
        return call4(SYS_semctl, object->id, 0, command, about);
    default:
        return call3(SYS_msgctl, object->id, command, about);
    }
}

static void set_object(struct object *object)
{
    word about[32];
    u32 *permissions = (u32 *)about;
    must(control(object, IPC_STAT, about), AT_SYSTEM_V, object->id);
    permissions[PERM_UID] = (u32)object->uid;
    permissions[PERM_GID] = (u32)object->gid;
    permissions[PERM_MODE] = (u32)object->mode;
    if (object->kind == OBJECT_QUEUE)
        about[QUEUE_MOST] = object->size;
    must(control(object, IPC_SET, about), AT_SYSTEM_V, object->id);
}

static void fill_object(struct object *object)
{
    if (object->kind == OBJECT_SEMAPHORES)
        must(control(object, SETALL, at(object->contents.at)), AT_SYSTEM_V, object->id);
    if (object->kind != OBJECT_QUEUE)
        return;
    struct queued *queued = at(object->contents.at);
    for (word i = 0; i < object->contents.count; i++, queued++)
        must(call4(SYS_msgsnd, object->id, at(queued->at), queued->size, IPC_NOWAIT), AT_SYSTEM_V, object->id);
}

/* Whether what is queued has room in the new queue: a program may lower the most of its queue below that afterwards. */
static int has_room(struct object *object)
{
    word about[32], total = 0;
    struct queued *queued = at(object->contents.at);
    for (word i = 0; i < object->contents.count; i++)
        total += queued[i].size;
    must(control(object, IPC_STAT, about), AT_SYSTEM_V, object->id);
    return total <= about[QUEUE_MOST];
}

static void make_system_v(void)
{
    struct setting *setting = at(plan()->settings.at);
    for (word i = 0; i < plan()->settings.count; i++, setting++)
        write_setting(setting, AT_SYSTEM_V);
    struct object *object = at(plan()->objects.at);
    for (word i = 0; i < plan()->objects.count; i++, object++) {
        write_setting(&object->next, AT_SYSTEM_V);
        act_as(object->cuid, object->cgid);
        long made = make_object(object, object->mode | IPC_CREAT | IPC_EXCL);
        act_as_root();
        must(made, AT_SYSTEM_V, object->id);
        if (made != (long)object->id)
            fail(AT_SYSTEM_V, -EINVAL, object->id);
        int fills_first = object->kind == OBJECT_QUEUE && has_room(object);
        if (fills_first)
            fill_object(object);
        set_object(object);
        if (!fills_first)
            fill_object(object);
    }
}

/* One that is to go with its last attachment has no key any more, and is attached by its number all the same. */
static void attach(struct shared *shared, word address)
{
    word flags = shared->how & SHARED_READ_ONLY ? SHM_RDONLY : 0;
    must(call3(SYS_shmat, shared->segment, address, flags), AT_SYSTEM_V, shared->segment);
    if (shared->how & SHARED_REMOVED)
        must(call3(SYS_shmctl, shared->segment, IPC_RMID, 0), AT_SYSTEM_V, shared->segment);
}

#endif
