/* Holds memory and answers: holder PORT MIB. Each line of a client is answered with `ok LINE` if all that it holds is as it
 * was written, else with `broken`. `eat MIB` makes it hold more. One thread, any number of connections. */
#include <netinet/in.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MOST_CLIENTS = 64, WORDS = (1 << 20) / 8 };

static uint64_t *pieces[4096];
static int count;

static void eat(int mib) {
    for (; mib > 0 && count < 4096; mib--, count++) {
        uint64_t *piece = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (piece == MAP_FAILED) exit(70);
        for (int i = 0; i < WORDS; i++) piece[i] = (uint64_t)count << 32 | (uint64_t)(i + 1);
        pieces[count] = piece;
    }
}

static int intact(void) {
    for (int n = 0; n < count; n++)
        for (int i = 0; i < WORDS; i += 512)
            if (pieces[n][i] != ((uint64_t)n << 32 | (uint64_t)(i + 1))) return 0;
    return 1;
}

/* Lines are short and come in one piece. */
static int serve(int fd) {
    char line[256], answer[300];
    ssize_t n = read(fd, line, sizeof line - 1);
    if (n <= 0) return 0;
    line[n] = 0;
    line[strcspn(line, "\r\n")] = 0;
    if (!strncmp(line, "eat ", 4)) eat(atoi(line + 4));
    int length = snprintf(answer, sizeof answer, intact() ? "ok %s\n" : "broken\n", line);
    return write(fd, answer, (size_t)length) == length;
}

int main(int argc, char **argv) {
    struct sockaddr_in6 at = { .sin6_family = AF_INET6, .sin6_port = htons((uint16_t)atoi(argc > 1 ? argv[1] : "7000")) };
    struct pollfd fds[MOST_CLIENTS + 1] = { { .events = POLLIN } };
    int one = 1, used = 1;
    eat(argc > 2 ? atoi(argv[2]) : 0);
    fds[0].fd = socket(AF_INET6, SOCK_STREAM, 0);
    setsockopt(fds[0].fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(fds[0].fd, (void *)&at, sizeof at) || listen(fds[0].fd, 64)) return 71;
    for (;;) {
        if (poll(fds, (nfds_t)used, -1) < 0) return 72;
        for (int i = used - 1; i > 0; i--)
            if (fds[i].revents && !serve(fds[i].fd)) {
                close(fds[i].fd);
                fds[i] = fds[--used];
            }
        if (fds[0].revents && used <= MOST_CLIENTS) {
            fds[used].fd = accept(fds[0].fd, NULL, NULL);
            if (fds[used].fd >= 0) fds[used++].events = POLLIN;
        }
    }
}
