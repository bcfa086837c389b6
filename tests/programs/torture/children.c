/* Processes: a child in a session of its own that is asked questions over pipes, an orphan (its parent has exited, so
 * the sandbox's pid 1 adopted it) that echoes over a socket pair, and a zombie that is never reaped. */
#include "torture.h"
#include <poll.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/wait.h>

_Atomic long *shared_counter;
static int to_child[2], from_child[2], to_orphan[2];
static pid_t child, zombie, reaper;
static pthread_mutex_t asking = PTHREAD_MUTEX_INITIALIZER;

/* Whether the record lock and the flock of the parent still exclude us. 'y', or which one does not. */
static char locks_hold(void) {
    int a = open(DIR_PATH "/posix-lock", O_RDWR | O_CLOEXEC), b = open(DIR_PATH "/bsd-lock", O_RDWR | O_CLOEXEC);
    int c = open(DIR_PATH "/ofd-lock", O_RDWR | O_CLOEXEC);
    struct flock l = { .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 10, .l_len = 1 };
    char answer = 'y';
    if (a < 0 || b < 0 || c < 0) answer = '!';
    else if (fcntl(a, F_SETLK, &l) == 0) answer = 'p';
    else if (flock(b, LOCK_EX | LOCK_NB) == 0) answer = 'b';
    else if (fcntl(c, F_OFD_SETLK, &l) == 0) answer = 'o';
    close(a), close(b), close(c);
    return answer;
}

static void child_main(pid_t parent) {
    pid_t me = getpid();
    setsid();
    for (;;) {
        char q, a = '?';
        ssize_t n = read(to_child[0], &q, 1);
        if (n == 0) _exit(0);
        if (n < 0) q = 'X';
        switch (q) {
        case 'X': a = errno == EINTR ? 'i' : 'x'; break;
        case 'E': a = 'e'; break;
        case 'L': a = locks_hold(); break;
        case 'S': atomic_fetch_add(shared_counter, 1), a = 's'; break;
        case 'P': a = getpid() == me && getppid() == parent && getsid(0) == me && getpgrp() == me ? 'y' : 'n'; break;
        }
        if (write(from_child[1], &a, 1) != 1) _exit(1);
    }
}

static void orphan_main(void) {
    char buf[64];
    ssize_t n;
    while ((n = recv(to_orphan[1], buf, sizeof buf - 1, 0)) > 0) {
        buf[n] = 0;
        char text[96];
        snprintf(text, sizeof text, "%d %s", getppid(), buf);
        send(to_orphan[1], text, strlen(text), MSG_NOSIGNAL);
    }
    _exit(n == 0 ? 0 : 1);
}

void children_start(void) {
    pid_t me = getpid();
    shared_counter = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared_counter == MAP_FAILED) die("mmap shared");
    MUST(pipe2(to_child, O_CLOEXEC)), MUST(pipe2(from_child, O_CLOEXEC));
    MUST(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, to_orphan));
    child = MUST(fork());
    if (child == 0) {
        close(to_child[1]), close(from_child[0]), close(to_orphan[0]), close(to_orphan[1]);
        child_main(me);
    }
    pid_t middle = MUST(fork());
    if (middle == 0) {
        close(to_orphan[0]), close(to_child[1]), close(from_child[0]);
        if (fork() == 0) orphan_main();
        _exit(0);
    }
    MUST(waitpid(middle, NULL, 0));
    close(to_orphan[1]), close(to_child[0]), close(from_child[1]);
    zombie = MUST(fork());
    if (zombie == 0) _exit(7);
    siginfo_t info;
    MUST(waitid(P_PID, (id_t)zombie, &info, WEXITED | WNOWAIT));
    *shared_counter = 1000;
}

int child_pid(void) { return child; }

int child_ask(char question) {
    char answer;
    pthread_mutex_lock(&asking);
    int r = -1;
    if (write(to_child[1], &question, 1) == 1) {
        struct pollfd p = { .fd = from_child[0], .events = POLLIN };
        if (poll(&p, 1, (int)patience_ms) == 1 && read(from_child[0], &answer, 1) == 1) r = answer;
    }
    pthread_mutex_unlock(&asking);
    return r;
}

static void check_orphan(void) {
    static int n;
    char text[96] = "", want[32];
    snprintf(want, sizeof want, "ping%d", ++n);
    if (send(to_orphan[0], want, strlen(want), MSG_NOSIGNAL) < 0) {
        broken("orphan is gone: %s", strerror(errno));
        return;
    }
    struct pollfd p = { .fd = to_orphan[0], .events = POLLIN };
    if (poll(&p, 1, (int)patience_ms) != 1 || recv(to_orphan[0], text, sizeof text - 1, 0) <= 0) {
        broken("orphan does not answer");
        return;
    }
    int parent = 0;
    char said[64] = "";
    sscanf(text, "%d %63s", &parent, said);
    EXPECT(!strcmp(said, want), "orphan said %s, not %s", said, want);
    if (!reaper) reaper = parent;
    EXPECT(parent == reaper, "orphan's parent was %d and is %d", (int)reaper, parent);
}

void children_check(void) {
    long before = *shared_counter;
    int a;
    EXPECT((a = child_ask('E')) == 'e', "child answers %c", a < 0 ? '-' : a);
    EXPECT((a = child_ask('P')) == 'y', "child's pid, parent, session or group changed (%c)", a < 0 ? '-' : a);
    EXPECT((a = child_ask('L')) == 'y', "a file lock does not hold: %c", a < 0 ? '-' : a);
    EXPECT((a = child_ask('S')) == 's' && *shared_counter == before + 1, "memory shared with the child parted");
    siginfo_t info = { 0 };
    EXPECT(!waitid(P_PID, (id_t)zombie, &info, WEXITED | WNOWAIT | WNOHANG) && info.si_pid == zombie &&
               info.si_status == 7, "the zombie changed (%d)", info.si_status);
    check_orphan();
}
