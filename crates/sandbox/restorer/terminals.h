/* Sessions and their terminals, which were held through the sleep. A part of restorer.c, whose `at`, `must` and `plan` it uses.
 * Source: ioctl_tty(2). */
#ifndef KIP_RESTORER_TERMINALS_H
#define KIP_RESTORER_TERMINALS_H

/* Its terminal was hung up while the process did not exist. */
static int hung_up;

/* Before it has children, which have the terminal from it. */
static void take_terminal(word index)
{
    struct session *session = at(plan()->terminals.at);
    for (word i = 0; i < plan()->terminals.count; i++, session++)
        if (session->leader == index) {
            long done = call3(SYS_ioctl, ours(session->ours), TIOCSCTTY, 0);
            hung_up = done == -EIO;
            if (!hung_up)
                must(done, AT_TERMINAL, session->ours);
        }
}

/* The group may be on its way. */
static void set_foreground(word index)
{
    struct session *session = at(plan()->terminals.at);
    for (word i = 0; i < plan()->terminals.count; i++, session++) {
        if (session->leader != index || !session->foreground || hung_up)
            continue;
        int group = (int)session->foreground;
        for (word until = now(1) + 10000000000UL;; call1(SYS_sched_yield, 0)) {
            long done = call3(SYS_ioctl, ours(session->ours), TIOCSPGRP, &group);
            if (done == -EIO || done == -ENOTTY)
                break;
            if ((done != -EPERM && done != -ESRCH) || now(1) > until) {
                must(done, AT_TERMINAL, session->foreground);
                break;
            }
        }
    }
}

/* What the kernel sends to the leader of a session whose terminal is hung up. Children inherit no such news. */
static void hang_up(word pid)
{
    if (!hung_up)
        return;
    call2(SYS_kill, pid, SIGHUP);
    call2(SYS_kill, pid, SIGCONT);
}

#endif
