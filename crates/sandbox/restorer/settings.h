/* What a process and each of its threads set about themselves, once memory and descriptors are there. A part of restorer.c,
 * whose `at`, `must` and `task_now` it uses. */
#ifndef KIP_RESTORER_SETTINGS_H
#define KIP_RESTORER_SETTINGS_H

enum { PR_SET_PDEATHSIG = 1, PR_SET_DUMPABLE = 4, PR_SET_NAME = 15, PR_CAPBSET_DROP = 24, PR_SET_SECUREBITS = 28, PR_SET_MM = 35,
       PR_SET_MM_MAP = 14, PR_SET_CHILD_SUBREAPER = 36, PR_SET_NO_NEW_PRIVS = 38, PR_SET_THP_DISABLE = 41, PR_CAP_AMBIENT = 47,
       PR_CAP_AMBIENT_RAISE = 2, PR_TIMER_CREATE_RESTORE_IDS = 77 };

static void set_mm(struct task *task)
{
    struct {
        word fields[11];
        word *auxv;
        u32 auxv_size, executable;
    } map;
    copy(map.fields, task->mm, sizeof map.fields);
    map.auxv = at(task->auxv.at);
    map.auxv_size = (u32)task->auxv.count;
    map.executable = (u32)ours(task->executable);
    must(call5(SYS_prctl, PR_SET_MM, PR_SET_MM_MAP, &map, sizeof map, 0), AT_MM, 0);
    if (task->thp_disabled)
        must(call5(SYS_prctl, PR_SET_THP_DISABLE, 1, 0, 0, 0), AT_MM, 1);
}

static void set_signals(struct task *task)
{
    struct signal *signal = at(task->signals.at);
    for (word i = 0; i < task->signals.count; i++, signal++) {
        word action[4] = { signal->handler, signal->flags, signal->restorer, signal->mask };
        must(call4(SYS_rt_sigaction, signal->number, action, 0, 8), AT_SIGNAL, signal->number);
    }
}

static void set_limits(struct task *task)
{
    struct limit *limit = at(task->limits.at);
    for (word i = 0; i < task->limits.count; i++, limit++) {
        word value[2] = { limit->soft, limit->hard };
        must(call4(SYS_prlimit64, 0, limit->resource, value, 0), AT_LIMIT, limit->resource);
    }
}

/* A timer that came due after something had come from the network, or would as the program begins, is due when the program has
 * had time to take that, `taken_within` from now: it has what came first before the signal. A periodic one keeps its beat, so its
 * signal is the daemon's to send. */
enum { MOST_MISSED = 0x7fffffff };

static int is_after_what_came(word due, word clock)
{
    word at = now(clock), waited = waited_since ? now(1) - waited_since : 0;
    return waited && due + waited > at && due < at + taken_within;
}

/* How many expirations of a periodic timer the daemon tells of; moves `due` to the one after those. */
static word next_expirations(word *due, word every, word clock)
{
    word count = (now(clock) + taken_within - *due) / every + 1;
    *due += count * every;
    return count;
}

/* A periodic one that has come due keeps its beat: its signal is sent now, the next is one of the old beat. */
static void set_intervals(struct task *task)
{
    for (word which = 0; which < 3; which++) {
        word left = task->interval[2 * which], every = task->interval[2 * which + 1];
        if (!left)
            continue;
        if (which == 0) {
            if (is_after_what_came(left, 1)) {
                struct said said = { WORD_ALARM, task_now, 0, 0, 0 };
                if (every) {
                    next_expirations(&left, every, 1);
                    report(&said, 0);
                } else {
                    left = now(1) + taken_within;
                }
            }
            word clock = now(1);
            if (left > clock) {
                left -= clock;
            } else {
                word over = clock - left;
                left = every ? every - over % every : 1000;
                if (every)
                    call2(SYS_kill, task->pid, SIGALRM);
            }
        }
        left = (left + 999) / 1000;
        word value[4] = { every / 1000000000UL, every / 1000 % 1000000, left / 1000000, left % 1000000 };
        must(call3(SYS_setitimer, which, value, 0), AT_TIMER, which);
    }
}

static void set_timers(struct task *task)
{
    struct timer *timer = at(task->timers.at);
    if (task->timers.count)
        must(call5(SYS_prctl, PR_TIMER_CREATE_RESTORE_IDS, 1, 0, 0, 0), AT_TIMER, 100);
    for (word i = 0; i < task->timers.count; i++, timer++) {
        struct {
            word value;
            int signal, notify;
            int thread, rest[11];
        } event = { timer->value, (int)timer->signal, (int)timer->notify, (int)timer->thread, { 0 } };
        int id = (int)timer->id;
        must(call3(SYS_timer_create, timer->clock, &event, &id), AT_TIMER, timer->id);
        if (!timer->due)
            continue;
        /* Absolute: one that is over fires at once, with its overruns, and keeps its beat. */
        word on = timer->due;
        if (timer->on && timer->notify != SIGEV_NONE && is_after_what_came(on, timer->on)) {
            if (timer->every) {
                word missed = next_expirations(&on, timer->every, timer->on) - 1;
                word thread = timer->notify & SIGEV_THREAD_ID ? timer->thread : 0;
                struct said said = { WORD_EXPIRED, task_now, timer->id | timer->signal << 32, timer->value,
                                     thread | (missed < MOST_MISSED ? missed : MOST_MISSED) << 32 };
                report(&said, 0);
            } else {
                on = now(timer->on) + taken_within;
            }
        }
        word due = timer->on ? on - now(timer->on) + now(timer->clock) : timer->due;
        word value[4] = { timer->every / 1000000000UL, timer->every % 1000000000UL, due / 1000000000UL, due % 1000000000UL };
        must(call4(SYS_timer_settime, id, timer->on ? 1 : 0, value, 0), AT_TIMER, timer->id);
    }
    if (task->timers.count)
        call5(SYS_prctl, PR_TIMER_CREATE_RESTORE_IDS, 0, 0, 0, 0);
}

static void set_locks(struct task *task)
{
    struct lock *lock = at(task->locks.at);
    for (word i = 0; i < task->locks.count; i++, lock++) {
        long done;
        if (lock->kind == 2) {
            done = call2(SYS_flock, lock->number, lock->type == 0 ? 1 | 4 : 2 | 4);
        } else {
            struct {
                short type, whence;
                int pad;
                word start, length;
                int pid, pad2;
            } what = { (short)lock->type, 0, 0, lock->start, lock->length, 0, 0 };
            done = call3(SYS_fcntl, lock->number, lock->kind == 1 ? 6 : 37, &what);
        }
        must(done, AT_LOCK, lock->number);
    }
}

static void set_watches(struct task *task)
{
    struct watch *watch = at(task->watches.at);
    for (word i = 0; i < task->watches.count; i++, watch++) {
        struct {
            u32 events;
            word data;
        } __attribute__((packed)) event = { (u32)watch->events, watch->data };
        call4(SYS_epoll_ctl, watch->set, 2, watch->number, 0);
        must(call4(SYS_epoll_ctl, watch->set, 1, watch->number, &event), AT_WATCH, watch->number);
    }
}

/* Signals that wait. All are blocked here, so they go on waiting. */
static void queue(struct span list, word pid, word thread)
{
    char *info = at(list.at);
    for (word i = 0; i < list.count; i++, info += INFO_SIZE) {
        int signal = *(int *)info;
        must(thread ? call4(SYS_rt_tgsigqueueinfo, pid, thread, signal, info) : call3(SYS_rt_sigqueueinfo, pid, signal, info),
             AT_SIGNAL, 1000 + (word)signal);
    }
}

static void set_thread(struct thread *thread)
{
    call1(SYS_set_tid_address, thread->clear_tid);
    if (thread->robust)
        must(call2(SYS_set_robust_list, thread->robust, thread->robust_size), AT_SETTING, 1);
    if (thread->stack_size) {
        word stack[3] = { thread->stack, thread->stack_flags & ~1UL, thread->stack_size };
        must(call2(SYS_sigaltstack, stack, 0), AT_SETTING, 2);
    }
    must(call2(SYS_prctl, PR_SET_NAME, at(thread->comm)), AT_SETTING, 3);
    if (thread->policy) {
        int priority = (int)thread->priority;
        must(call3(SYS_sched_setscheduler, 0, thread->policy, &priority), AT_SETTING, 4);
    }
    if (thread->nice)
        must(call3(SYS_setpriority, 0, 0, thread->nice), AT_SETTING, 5);
    queue(thread->pending, ((struct task *)at(plan()->tasks.at) + task_now)->pid, thread->id);
    if (thread->rseq)
        must(call4(SYS_rseq, thread->rseq, thread->rseq_size, 0, thread->rseq_signature), AT_SETTING, 6);
}

static void set_ids(struct credentials *c)
{
    /* SECBIT_NO_SETUID_FIXUP: capabilities stay when the user changes. */
    must(call2(SYS_prctl, PR_SET_SECUREBITS, 1 << 2), AT_CREDENTIALS, 1);
    for (word bit = 0; bit < 64; bit++)
        if (!(c->bounding >> bit & 1) && call2(SYS_prctl, PR_CAPBSET_DROP, bit) == -EINVAL)
            break;
    must(call2(SYS_setgroups, c->groups.count, at(c->groups.at)), AT_CREDENTIALS, 2);
    must(call3(SYS_setresgid, c->gid, c->egid, c->sgid), AT_CREDENTIALS, 3);
    must(call3(SYS_setresuid, c->uid, c->euid, c->suid), AT_CREDENTIALS, 4);
    call1(SYS_setfsgid, c->fsgid);
    call1(SYS_setfsuid, c->fsuid);
    must(call2(SYS_prctl, PR_SET_SECUREBITS, c->securebits), AT_CREDENTIALS, 5);
    if (c->no_new_privs)
        must(call5(SYS_prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), AT_CREDENTIALS, 6);
}

static void set_capabilities(struct thread *thread)
{
    struct credentials *c = at(thread->credentials);
    struct {
        u32 version;
        int pid;
    } head = { 0x20080522, 0 };
    u32 sets[6] = { (u32)c->effective, (u32)c->permitted, (u32)c->inheritable,
                    (u32)(c->effective >> 32), (u32)(c->permitted >> 32), (u32)(c->inheritable >> 32) };
    must(call2(SYS_capset, &head, sets), AT_CREDENTIALS, 7);
    for (word bit = 0; c->ambient >> bit; bit++)
        if (c->ambient >> bit & 1)
            must(call5(SYS_prctl, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, bit, 0, 0), AT_CREDENTIALS, 8);
    /* A change of credentials clears it. */
    if (thread->death_signal)
        must(call2(SYS_prctl, PR_SET_PDEATHSIG, thread->death_signal), AT_SETTING, 7);
}

#endif
