/* Carries out orders on its memory and tells what it sees there. What it should see only the test knows (test_memory.py).
 *
 *   memory PORT [criu]
 *
 * Regions have numbers that the test chooses. A page is filled wholly: word I of it is TAG << 16 | I. So a page that is of
 * another place, of another time, in part or no more, is told from the right one. Answers lines on TCP, one for each:
 *
 *   map ID PAGES | shared ID PAGES | file ID PAGES TAG     new regions; page I of the file has the tag TAG + I
 *   write ID FIRST COUNT TAG | zero ID FIRST COUNT         page I gets the tag TAG + I, or zeros: how many could be written
 *   unmap ID FIRST COUNT | renew ID FIRST COUNT | drop ID FIRST COUNT | protect ID FIRST COUNT none|r|rw
 *   advise ID wipe|keep|apart|inherit|huge|small|lock|unlock
 *   resize ID PAGES | move ID PAGES | carry ID             mremap: where it likes, to a fresh place, page by page
 *   split ID NEW                                           to a fresh place; the old one stays, as region NEW
 *   brk PAGES | dive PAGES TAG | signal COUNT
 *   look ID                                                every page: t5+3 (the tags 5, 6, 7), zero+2, hole+1, shut+1 ...
 *   regions                                                ID:PAGES of all
 *   fork NAME | end NAME | exec | thread NAME ID | unthread NAME
 *   @CHILD ORDER | %THREAD ORDER                           carried out by that child or thread
 *
 * Of its own it has the region 1 in the stack of its first thread, 2 in the heap and 3, into which a signal handler writes. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096UL
#define WORDS (PAGE / sizeof(long))
#define MANY 64
#define STACK_PAGES 24
#define SIGNAL_PAGES 8
#define SIGNAL_TAG (1UL << 40)
#define LINE 65536

enum { STACK = 1, HEAP, SIGNALS };
enum { FINE, HOLE, SHUT, BUS }; /* what comes of touching a page */

struct region {
    long id; /* 0: none */
    char *at;
    unsigned long pages;
};
struct child {
    char name[16]; /* empty: none */
    pid_t pid;
    int fd;
};
struct thread {
    char name[16]; /* empty: none */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t told;
    char *order, *answer; /* an order without an answer is to be carried out; none at all: it is done */
    int ends;
    long stack;
};

static struct region regions[MANY];
static struct child children[MANY];
static struct thread threads[MANY];
static char signal_pages[SIGNAL_PAGES * PAGE] __attribute__((aligned(4096)));
static volatile unsigned long signals;
static __thread sigjmp_buf touched;
static __thread volatile int touching;
static __thread char other_stack[8 * PAGE];

/* Fresh places: no other call maps anything there, so that a hole stays one. There is room to grow (LARGEST in the test). */
static char *fresh(void) {
    static char *next = (char *)0x100000000000;
    char *at = next;
    next += 2048 * PAGE;
    return at;
}

static void die(const char *what) {
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    _exit(1);
}

static struct region *find(long id) {
    for (int i = 0; i < MANY; i++)
        if (regions[i].id == id) return &regions[i];
    fprintf(stderr, "there is no region %ld\n", id);
    _exit(1);
}

static struct region *add(long id, void *at, unsigned long pages) {
    if (at == MAP_FAILED) die("a new region");
    struct region *r = find(0);
    *r = (struct region){ id, at, pages };
    return r;
}

static void fill(void *page, unsigned long tag) {
    volatile unsigned long *words = page;
    for (unsigned long i = 0; i < WORDS; i++) words[i] = tag ? tag << 16 | i : 0;
}

/* The tag of a page, 0 for zeros; in *wrong the first word that does not go with it, WORDS if there is none. */
static unsigned long tag_of(const void *page, unsigned long *wrong) {
    const volatile unsigned long *words = page;
    unsigned long tag = words[0] >> 16, i = 0;
    while (i < WORDS && words[i] == (tag ? tag << 16 | i : 0)) i++;
    *wrong = i;
    return tag;
}

static void on_fault(int number, siginfo_t *info, void *context) {
    (void)context;
    if (!touching) die("a fault that nobody expects");
    siglongjmp(touched, number == SIGBUS ? BUS : info->si_code == SEGV_MAPERR ? HOLE : SHUT);
}

static void on_signal(int number) {
    (void)number;
    unsigned long page[WORDS], wrong;
    fill(page, SIGNAL_TAG + signals);
    fill(signal_pages + signals % SIGNAL_PAGES * PAGE, tag_of(page, &wrong));
    signals = signals + 1;
}

static void take_signals(void) {
    stack_t stack = { .ss_sp = other_stack, .ss_size = sizeof other_stack };
    if (sigaltstack(&stack, NULL)) die("sigaltstack");
}

static int try_fill(void *page, unsigned long tag) {
    int seen = sigsetjmp(touched, 0);
    if (!seen) {
        touching = 1;
        fill(page, tag);
    }
    touching = 0;
    return seen;
}

static int try_tag(const void *page, unsigned long *tag, unsigned long *wrong) {
    int seen = sigsetjmp(touched, 0);
    if (!seen) {
        touching = 1;
        *tag = tag_of(page, wrong);
    }
    touching = 0;
    return seen;
}

/* Runs of pages: what they are, whether their tags count up, how many. */
static void look(struct region *r, char *out) {
    static const char *const words[] = { "zero", "hole", "shut", "bus" };
    unsigned long count = 0, first = 0;
    int kind = -1;
    *out = 0;
    for (unsigned long i = 0; i <= r->pages; i++) {
        unsigned long tag = 0, wrong = WORDS;
        int seen = i < r->pages ? try_tag(r->at + i * PAGE, &tag, &wrong) : -1;
        int now = seen == FINE && tag ? BUS + 1 : seen;
        if (count && (now != kind || wrong != WORDS || (now > BUS && tag != first + count))) {
            out += kind > BUS ? sprintf(out, "t%lu+%lu ", first, count) : sprintf(out, "%s+%lu ", words[kind], count);
            count = 0;
        }
        if (i == r->pages) break;
        if (wrong != WORDS) {
            unsigned long word = ((unsigned long *)(r->at + i * PAGE))[wrong];
            out += sprintf(out, "t%lu broken at %lu, page %lu: %lx ", tag, wrong, i, word);
            continue;
        }
        if (!count++) kind = now, first = tag;
    }
}

/* New pages of the stack, each frame with one; every one is looked at again on the way back. */
static unsigned long __attribute__((noinline)) dive(unsigned long depth, unsigned long tag) {
    unsigned long page[WORDS], wrong;
    fill(page, tag);
    unsigned long broken = depth > 1 ? dive(depth - 1, tag + 1) : 0;
    return broken + (tag_of(page, &wrong) != tag || wrong != WORDS);
}

static void file(long id, unsigned long pages, unsigned long tag) {
    char path[64], page[PAGE];
    snprintf(path, sizeof path, "/tmp/memory-%ld", id);
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    for (unsigned long i = 0; i < pages; i++) {
        fill(page, tag + i);
        if (write(fd, page, PAGE) != (long)PAGE) die(path);
    }
    add(id, mmap(fresh(), pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED_NOREPLACE, fd, 0), pages);
    close(fd);
}

static int advise(struct region *r, const char *how) {
    static const struct { const char *word; int advice; } all[] = {
        { "wipe", MADV_WIPEONFORK }, { "keep", MADV_KEEPONFORK }, { "apart", MADV_DONTFORK },
        { "inherit", MADV_DOFORK },  { "huge", MADV_HUGEPAGE },   { "small", MADV_NOHUGEPAGE },
    };
    if (!strcmp(how, "lock")) return mlock(r->at, r->pages * PAGE);
    if (!strcmp(how, "unlock")) return munlock(r->at, r->pages * PAGE);
    for (unsigned i = 0; i < sizeof all / sizeof *all; i++)
        if (!strcmp(how, all[i].word)) return madvise(r->at, r->pages * PAGE, all[i].advice);
    return -1;
}

/* 0: refused, and all is as it was. */
static int resize(struct region *r, unsigned long pages, char *to) {
    char *at = mremap(r->at, r->pages * PAGE, pages * PAGE, MREMAP_MAYMOVE | (to ? MREMAP_FIXED : 0), to);
    if (at == MAP_FAILED) return 0;
    int moved = at != r->at;
    *r = (struct region){ r->id, at, pages };
    return 1 + moved;
}

static void carry(struct region *r) {
    char *to = fresh();
    for (unsigned long i = 0; i < r->pages; i++)
        if (mremap(r->at + i * PAGE, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to + i * PAGE) == MAP_FAILED && errno != EFAULT)
            die("carry"); /* EFAULT: a hole, which it stays */
    r->at = to;
}

static void split(struct region *r, long id) {
    char *to = fresh(), *old = r->at;
    r->at = mremap(old, r->pages * PAGE, r->pages * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, to);
    if (r->at != to) die("split");
    add(id, old, r->pages);
}

static int read_line(int fd, char *line) {
    for (int n = 0; n < LINE - 1; n++) {
        if (read(fd, line + n, 1) != 1) return 0;
        if (line[n] == '\n') return line[n] = 0, 1;
    }
    return 0;
}

static int write_line(int fd, char *line) {
    size_t length = strlen(line);
    line[length] = '\n';
    return write(fd, line, length + 1) == (ssize_t)length + 1;
}

static void serve(int fd);

/* The child has nothing of ours but memory: our threads are not in it, our connections and children are no business of its. */
static void be_child(int fd) {
    for (int i = 0; i < MANY; i++) {
        if (*children[i].name) close(children[i].fd);
        *children[i].name = 0;
        if (*threads[i].name) find(threads[i].stack)->id = 0;
        *threads[i].name = 0;
    }
    for (int other = 3; other < 100; other++)
        if (other != fd) close(other);
    serve(fd);
    _exit(0);
}

static void bear(const char *name) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends)) die("socketpair");
    fcntl(ends[0], F_SETFD, FD_CLOEXEC);
    pid_t pid = fork();
    if (pid < 0) die("fork");
    if (pid == 0) be_child(ends[1]);
    close(ends[1]);
    for (int i = 0; i < MANY; i++)
        if (!*children[i].name) {
            strcpy(children[i].name, name);
            children[i].pid = pid;
            children[i].fd = ends[0];
            return;
        }
}

static void end_child(struct child *c) {
    int status;
    close(c->fd);
    *c->name = 0;
    if (waitpid(c->pid, &status, 0) != c->pid || status) die("a child did not end well");
}

static void obey(char *line, char *answer);

static void *thread(void *arg) {
    struct thread *t = arg;
    char stack[(STACK_PAGES + 1) * PAGE], *at = (char *)(((unsigned long)stack + PAGE - 1) & -PAGE);
    memset(at, 0, STACK_PAGES * PAGE); /* an old thread may have left something there */
    take_signals();
    pthread_mutex_lock(&t->lock);
    add(t->stack, at, STACK_PAGES);
    while (!t->ends) {
        if (t->order) obey(t->order, t->answer);
        t->order = NULL;
        pthread_cond_broadcast(&t->told);
        while (!t->order && !t->ends) pthread_cond_wait(&t->told, &t->lock);
    }
    find(t->stack)->id = 0;
    pthread_mutex_unlock(&t->lock);
    return NULL;
}

static void hand_over(struct thread *t, char *order, char *answer) {
    pthread_mutex_lock(&t->lock);
    t->order = order, t->answer = answer;
    pthread_cond_broadcast(&t->told);
    while (t->order) pthread_cond_wait(&t->told, &t->lock);
    pthread_mutex_unlock(&t->lock);
}

static void start_thread(const char *name, long id) {
    struct thread *t = threads;
    while (*t->name) t++;
    static char nothing[] = "regions", answer[LINE];
    *t = (struct thread){ .lock = PTHREAD_MUTEX_INITIALIZER, .told = PTHREAD_COND_INITIALIZER, .stack = id };
    strcpy(t->name, name);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 512 << 10);
    if (pthread_create(&t->thread, &attributes, thread, t)) die("pthread_create");
    hand_over(t, nothing, answer); /* it has begun */
}

static void end_thread(struct thread *t) {
    pthread_mutex_lock(&t->lock);
    t->ends = 1;
    pthread_cond_broadcast(&t->told);
    pthread_mutex_unlock(&t->lock);
    pthread_join(t->thread, NULL);
    *t->name = 0;
}

static struct child *child_of(const char *name) {
    for (int i = 0; i < MANY; i++)
        if (!strcmp(children[i].name, name)) return &children[i];
    fprintf(stderr, "there is no child %s\n", name);
    _exit(1);
}

static struct thread *thread_of(const char *name) {
    for (int i = 0; i < MANY; i++)
        if (!strcmp(threads[i].name, name)) return &threads[i];
    fprintf(stderr, "there is no thread %s\n", name);
    _exit(1);
}

/* Orders on some pages of a region. */
static void obey_on_pages(const char *order, struct region *r, const unsigned long *n, const char *word, char *answer) {
    char *at = r->at + n[1] * PAGE;
    unsigned long size = n[2] * PAGE, i = 0;
    int done = 0;
    if (!strcmp(order, "write") || !strcmp(order, "zero")) {
        while (i < n[2] && try_fill(at + i * PAGE, *order == 'w' ? n[3] + i : 0) == FINE) i++;
        sprintf(answer, "written %lu", i);
        return;
    }
    if (!strcmp(order, "unmap")) done = munmap(at, size);
    else if (!strcmp(order, "drop")) done = madvise(at, size, MADV_DONTNEED);
    else if (!strcmp(order, "renew")) {
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
        done = mmap(at, size, PROT_READ | PROT_WRITE, flags, -1, 0) == MAP_FAILED ? -1 : 0;
    } else done = mprotect(at, size, !strcmp(word, "none") ? PROT_NONE : !strcmp(word, "r") ? PROT_READ : PROT_READ | PROT_WRITE);
    sprintf(answer, "%s", done ? strerrorname_np(errno) : "done");
    if (!strcmp(order, "unmap") && n[2] == r->pages) r->id = 0;
}

/* Orders on a region as a whole; 0 if it is none. */
static int obey_on_region(const char *order, unsigned long *n, const char *word, char *answer) {
    static const char *const resized[] = { "refused", "stayed", "moved" };
    int flags = MAP_ANONYMOUS | MAP_FIXED_NOREPLACE | (*order == 's' ? MAP_SHARED : MAP_PRIVATE);
    if (!strcmp(order, "map") || !strcmp(order, "shared"))
        add((long)n[0], mmap(fresh(), n[1] * PAGE, PROT_READ | PROT_WRITE, flags, -1, 0), n[1]);
    else if (!strcmp(order, "file")) file((long)n[0], n[1], n[2]);
    else if (!strcmp(order, "look")) look(find((long)n[0]), answer);
    else if (!strcmp(order, "advise"))
        sprintf(answer, "%s", advise(find((long)n[0]), word) ? strerrorname_np(errno) : "done");
    else if (!strcmp(order, "resize")) sprintf(answer, "%s", resized[resize(find((long)n[0]), n[1], NULL)]);
    else if (!strcmp(order, "move")) sprintf(answer, "%s", resized[resize(find((long)n[0]), n[1], fresh())]);
    else if (!strcmp(order, "carry")) carry(find((long)n[0]));
    else if (!strcmp(order, "split")) split(find((long)n[0]), (long)n[1]);
    else return 0;
    return 1;
}

static void obey(char *line, char *answer) {
    static const char *const on_pages[] = { "write", "zero", "unmap", "renew", "drop", "protect" };
    char order[16] = "", name[16] = "", word[16] = "";
    unsigned long n[4] = { 0 };
    strcpy(answer, "done");
    if (*line == '@' || *line == '%') {
        char *rest = strchr(line, ' ');
        *rest++ = 0;
        if (*line == '%') {
            hand_over(thread_of(line + 1), rest, answer);
            return;
        }
        int fd = child_of(line + 1)->fd;
        if (!write_line(fd, rest) || !read_line(fd, answer)) strcpy(answer, "the child is gone");
        return;
    }
    sscanf(line, "%15s %15s", order, name);
    sscanf(line, "%*s %lu %lu %lu %lu", &n[0], &n[1], &n[2], &n[3]);
    if (strrchr(line, ' ')) sscanf(strrchr(line, ' '), " %15s", word);
    for (unsigned i = 0; i < sizeof on_pages / sizeof *on_pages; i++)
        if (!strcmp(order, on_pages[i])) {
            obey_on_pages(order, find((long)n[0]), n, word, answer);
            return;
        }
    if (obey_on_region(order, n, word, answer)) return;
    if (!strcmp(order, "brk")) {
        struct region *heap = find(HEAP);
        if (brk(heap->at + n[0] * PAGE)) die("brk");
        heap->pages = n[0];
    } else if (!strcmp(order, "dive")) {
        if (dive(n[0], n[1])) strcpy(answer, "broken");
    } else if (!strcmp(order, "signal")) {
        while (n[0]--) pthread_kill(pthread_self(), SIGUSR1);
        sprintf(answer, "signals %lu", signals);
    } else if (!strcmp(order, "regions")) {
        for (int i = 0; i < MANY; i++)
            if (regions[i].id) answer += sprintf(answer, "%ld:%lu ", regions[i].id, regions[i].pages);
    } else if (!strcmp(order, "fork")) bear(name);
    else if (!strcmp(order, "end")) end_child(child_of(name));
    else if (!strcmp(order, "thread")) start_thread(name, strtol(word, NULL, 10));
    else if (!strcmp(order, "unthread")) end_thread(thread_of(name));
    else strcpy(answer, "what?");
}

static void serve(int fd) {
    static char line[LINE], answer[LINE];
    while (read_line(fd, line)) {
        if (!strcmp(line, "exec")) {
            char number[16];
            sprintf(number, "%d", fd);
            execl("/proc/self/exe", "memory", "child", number, NULL);
            die("exec");
        }
        obey(line, answer);
        if (!write_line(fd, answer)) break;
    }
    close(fd);
}

/* All that malloc(3) will ever need lies below our heap. */
static char *own_heap(void) {
    mallopt(M_TOP_PAD, 1 << 20);
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
    mallopt(M_ARENA_MAX, 1);
    free(malloc(1));
    char *at = (char *)(((unsigned long)sbrk(0) + PAGE - 1) & -PAGE);
    if (brk(at)) die("brk");
    return at;
}

int main(int argc, char **argv) {
    if (argc < 2) return 2;
    char stack[(STACK_PAGES + 1) * PAGE];
    char *at = (char *)(((unsigned long)stack + PAGE - 1) & -PAGE);
    memset(at, 0, STACK_PAGES * PAGE);
    add(STACK, at, STACK_PAGES);
    add(HEAP, own_heap(), 0);
    add(SIGNALS, signal_pages, SIGNAL_PAGES);
    take_signals();
    struct sigaction faults = { .sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER };
    struct sigaction counted = { .sa_handler = on_signal, .sa_flags = SA_ONSTACK };
    sigaction(SIGSEGV, &faults, NULL);
    sigaction(SIGBUS, &faults, NULL);
    sigaction(SIGUSR1, &counted, NULL);
    if (!strcmp(argv[1], "child")) {
        char begun[16] = "done";
        if (write_line(atoi(argv[2]), begun)) serve(atoi(argv[2]));
        return 0;
    }
    if (argc > 2 && dup(open("/proc/self/statm", O_RDONLY)) < 0) die("open"); /* only CRIU restores what two descriptors share */
    int one = 1, listener = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in6 a = { .sin6_family = AF_INET6, .sin6_port = htons((unsigned short)atoi(argv[1])) };
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (void *)&a, sizeof a) || listen(listener, 16)) die("listen");
    for (;;) {
        int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (fd >= 0) serve(fd);
    }
}
