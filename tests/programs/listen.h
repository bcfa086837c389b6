/* Where a test's program answers: port 7000 on every address. */
#ifndef LISTEN_H
#define LISTEN_H

#include <netinet/in.h>
#include <stdlib.h>
#include <sys/socket.h>

/* A socket that listens there. The program ends where that cannot be. */
static int listen_7000(void)
{
	struct sockaddr_in any = { .sin_family = AF_INET, .sin_port = htons(7000) };
	int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0);
	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
	if (bind(listener, (void *)&any, sizeof any) || listen(listener, 50))
		exit(1);
	return listener;
}

#endif
