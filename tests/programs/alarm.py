"""Line server with timers, for what becomes of them: `alarm.py PORT`. `sleep MS` and `itimer MS` arm one, by a thread that sleeps
and by setitimer(2); `late KIND` says by how many milliseconds it was late, or `armed`; anything else is echoed."""

import selectors
import signal
import socket
import sys
import threading
import time

due: dict[str, float] = {}
late: dict[str, int] = {}


def ring(kind: str) -> None:
    late[kind] = round((time.time() - due[kind]) * 1000)


def sleep(seconds: float) -> None:
    time.sleep(seconds)
    ring("sleep")


def answer(line: str) -> str:
    word, _, rest = line.partition(" ")
    if word in ("sleep", "itimer"):
        seconds = int(rest) / 1000
        due[word] = time.time() + seconds
        if word == "sleep":
            threading.Thread(target=sleep, args=(seconds,), daemon=True).start()
        else:
            signal.setitimer(signal.ITIMER_REAL, seconds)
        return "armed"
    return str(late.get(rest, "armed")) if word == "late" else line


def main() -> None:
    signal.signal(signal.SIGALRM, lambda *_: ring("itimer"))
    selector = selectors.DefaultSelector()
    listener = socket.create_server(("", int(sys.argv[1])))
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                selector.register(listener.accept()[0], selectors.EVENT_READ)
                continue
            try:
                data = key.fileobj.recv(4096)
            except ConnectionError:
                data = b""
            if data:
                key.fileobj.sendall(answer(data.decode().strip()).encode() + b"\n")
            else:
                selector.unregister(key.fileobj)
                key.fileobj.close()


main()
