"""Writes the number of its turn to one page after the other of SIZE MiB, all the time, and says to each client whether its memory is
that of one moment: pages before its place have this turn's number, all others the last one's. All the while no child of its is there
that it has not made, and it goes on to handle SIGTRAP. Options: `apart` and `much-apart`, memory that no fork copies; `full`, as many
processes as its limit lets it have; `adopts`, it is the parent of what its descendants leave behind; `fifo`, it has a FIFO open, which CRIU alone makes anew."""

import contextlib
import ctypes
import mmap
import os
import signal
import socket
import sys
import threading

PAGE, MANY = 4096, 64
WALL, WIPE_ON_FORK, SET_CHILD_SUBREAPER, GET_CHILD_SUBREAPER = 0x40000000, 18, 36, 37
libc = ctypes.CDLL(None)
size, options = int(sys.argv[1]) << 20, sys.argv[2:]
memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE)
apart = mmap.mmap(-1, 100 << 20, flags=mmap.MAP_PRIVATE)
if "apart" in options or "much-apart" in options:
    for start in range(0, len(apart) if "much-apart" in options else 16 * PAGE, PAGE):
        apart[start : start + 5] = b"apart"
    apart.madvise(mmap.MADV_DONTFORK)
wiped = mmap.mmap(-1, PAGE, flags=mmap.MAP_PRIVATE)
wiped.madvise(WIPE_ON_FORK)
wiped[:5] = b"wiped"
signal.signal(signal.SIGTRAP, lambda number, frame: None)
if "adopts" in options:
    libc.prctl(SET_CHILD_SUBREAPER, 1)
if "fifo" in options:
    os.mkfifo("/tmp/sweeper")
    fifo = os.open("/tmp/sweeper", os.O_RDWR)
children = 0
while "full" in options:
    try:
        child = os.fork()
    except BlockingIOError:
        break
    if child == 0:
        threading.Event().wait()
    children += 1
turn, place = 1, 0
pages = size // PAGE
strange: list[object] = []


def word(page: int) -> int:
    return int.from_bytes(memory[page * PAGE : page * PAGE + 8], "little")


def check() -> str:
    for page in range(pages):
        if word(page) != (turn if page < place else turn - 1):
            return f"page {page} of {pages} has {word(page)} in turn {turn} at {place}"
    if ("apart" in options or "much-apart" in options) and apart[15 * PAGE : 15 * PAGE + 5] != b"apart":
        return "what no fork copies is lost"
    with open("/proc/self/status") as status:
        caught = next(int(line.split()[1], 16) for line in status if line.startswith("SigCgt:"))
    if not caught & 1 << signal.SIGTRAP - 1:
        return "SIGTRAP is not handled any more"
    adopts = ctypes.c_int()
    libc.prctl(GET_CHILD_SUBREAPER, ctypes.byref(adopts))
    if adopts.value != ("adopts" in options):
        return f"it adopts: {adopts.value}"
    kept = "kept" if wiped[:5] == b"wiped" else "zeros" if wiped[:5] == bytes(5) else "damaged"
    return f"strange {strange}" if strange else f"sound, {kept}, turn {turn}"


def look() -> None:
    """For children that this process has not made."""
    with contextlib.suppress(ChildProcessError):
        found = os.waitpid(-1, os.WNOHANG | WALL)
        if found[0] or not children:
            strange.append(found)


listener = socket.create_server(("", 8080))
listener.setblocking(False)
print("up", flush=True)
while True:
    for _ in range(MANY):
        memory[place * PAGE : place * PAGE + 8] = turn.to_bytes(8, "little")
        place += 1
        if place == pages:
            turn, place = turn + 1, 0
    look()
    with contextlib.suppress(BlockingIOError):
        client, _ = listener.accept()
        client.sendall(check().encode() + b"\n")
        client.close()
