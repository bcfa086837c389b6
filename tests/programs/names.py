"""A name server and web servers of a world outside: names.py ADDRESS NAME=ADDRESS ..; a name `*.X` is for all below X."""

import http.server
import socket
import struct
import sys
import threading


def answer(question: bytes, table: dict[str, str]) -> bytes:
    at, labels = 12, []
    while question[at]:
        labels.append(question[at + 1 : at + 1 + question[at]].decode().lower())
        at += 1 + question[at]
    end = at + 5
    kind = struct.unpack(">H", question[at + 1 : at + 3])[0]
    address = table.get(".".join(labels)) or table.get(".".join(["*", *labels[1:]]))
    records = b""
    if address and kind == 1:
        # By way of an alias, as large sites have it: both point back to the question's name.
        alias = b"\x04edge\xc0\x0c"
        records = b"\xc0\x0c" + struct.pack(">HHIH", 5, 1, 60, len(alias)) + alias
        records += alias + struct.pack(">HHIH", 1, 1, 60, 4) + socket.inet_aton(address)
    flags = 0x8180 if address else 0x8183
    return question[:2] + struct.pack(">HHHHH", flags, 1, 2 if records else 0, 0, 0) + question[12:end] + records


class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = f"page of {self.headers['Host']}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    own, table = sys.argv[1], dict(word.split("=") for word in sys.argv[2:])
    for port in (80, 81):
        server = http.server.ThreadingHTTPServer(("0.0.0.0", port), Page)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    names = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    names.bind((own, 53))
    print("ready", flush=True)
    while True:
        question, client = names.recvfrom(2000)
        names.sendto(answer(question, table), client)


main()
