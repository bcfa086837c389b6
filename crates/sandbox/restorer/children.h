/* How a process makes its children, and what it has been told of them. A part of restorer.c, whose `at`, `must` and `plan` it
 * uses. */
#ifndef KIP_RESTORER_CHILDREN_H
#define KIP_RESTORER_CHILDREN_H

static void run_task(word index) __attribute__((noreturn));

/* The parent has long been told of these children; what waits for it otherwise is queued later. */
static void drop_child_signals(void)
{
    word child = 1UL << (SIGCHLD - 1), none[2] = { 0, 0 };
    while (call4(SYS_rt_sigtimedwait, &child, 0, none, sizeof child) > 0)
        ;
}

/* Those before setsid(2); those that have none of their maker's mappings; those that have some. */
enum { FORK_EARLY, FORK_OTHERS, FORK_HEIRS };

static void fork_children(word index, int which)
{
    struct task *tasks = at(plan()->tasks.at), *task = tasks;
    int ended = 0;
    for (word i = 0; i < plan()->tasks.count; i++, task++) {
        if (task->maker != index || which != (task->early ? FORK_EARLY : task->inherits ? FORK_HEIRS : FORK_OTHERS))
            continue;
        int pid = (int)task->pid;
        /* The signal at its end is that of its maker, if that is not its parent. */
        struct clone how = { task->sibling ? CLONE_PARENT : 0, 0, 0, 0, task->sibling ? 0 : SIGCHLD, 0, 0, 0, (word)&pid, 1, 0 };
        if (must(call2(SYS_clone3, &how, sizeof how), AT_FORK, task->pid) == 0)
            run_task(i);
        if (task->state != TASK_GHOST)
            continue;
        must(call5(SYS_waitid, P_PID, task->pid, 0, WEXITED, 0), AT_FORK, task->pid);
        ended = 1;
    }
    task = tasks;
    for (word i = 0; which == FORK_HEIRS && i < plan()->tasks.count; i++, task++) {
        if (task->state != TASK_DEAD || (task->sibling ? tasks[task->maker].maker : task->maker) != index)
            continue;
        must(call5(SYS_waitid, P_PID, task->pid, 0, WEXITED | WNOWAIT, 0), AT_FORK, task->pid);
        ended = 1;
    }
    if (ended)
        drop_child_signals();
}

/* Children that a signal had stopped stop themselves once they are ready. That is not news for the parent, unless it had not
 * been told before. */
static void await_stopped(word index)
{
    struct task *task = at(plan()->tasks.at);
    int stopped = 0;
    for (word i = 0; i < plan()->tasks.count; i++, task++) {
        if (task->maker != index || task->sibling || task->state != TASK_STOPPED)
            continue;
        word keep = task->status ? WNOWAIT : 0;
        must(call5(SYS_waitid, P_PID, task->pid, 0, WSTOPPED | WEXITED | keep, 0), AT_FORK, task->pid);
        stopped = 1;
    }
    if (stopped)
        drop_child_signals();
}

#endif
