"""Echo server for the port tests: TCP and UDP, IPv4 and IPv6, on every port given; a client can ask for its own address.

Usage: echo.py PORT.. ; each port is served by both protocols and both families. A line `who` is answered with the
peer's address as seen from inside, anything else is echoed."""

import selectors
import socket
import sys


def main() -> None:
    selector = selectors.DefaultSelector()
    for port in map(int, sys.argv[1:]):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            s = socket.socket(socket.AF_INET6, kind)
            s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(("::", port))
            if kind == socket.SOCK_STREAM:
                s.listen(64)
            selector.register(s, selectors.EVENT_READ, "listen" if kind == socket.SOCK_STREAM else "udp")
    while True:
        for key, _ in selector.select():
            s = key.fileobj
            if key.data == "listen":
                selector.register(s.accept()[0], selectors.EVENT_READ, "connection")
            elif key.data == "udp":
                data, peer = s.recvfrom(65535)
                s.sendto(peer[0].encode() if data.strip() == b"who" else data, peer)
            else:
                try:
                    data = s.recv(65535)
                except ConnectionError:
                    data = b""
                if not data:
                    selector.unregister(s)
                    s.close()
                elif data.strip() == b"who":
                    s.sendall(s.getpeername()[0].encode() + b"\n")
                else:
                    s.sendall(data)


main()
