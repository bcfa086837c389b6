"""Server on port 7000 whose processes have something odd: `odd.py KIND`. To each connection it says `ok`, or what of the oddity is
not as it was: an oddity must not only be there after a wake, it must still do what it is for."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable

PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, SYS_seccomp, SYS_sched_yield, SYS_getpriority = 36, 38, 317, 24, 140
libc = ctypes.CDLL(None, use_errno=True)
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
# The one that is being answered.
clients: list[socket.socket] = []


def rest() -> None:
    while True:
        signal.pause()


def child(what: Callable[[], None] = rest) -> int:
    """A new process that does it and ends."""
    pid = os.fork()
    if pid:
        return pid
    try:
        for client in clients:
            client.close()
        what()
    except BaseException:  # noqa: BLE001  (it must not go on as its parent does)
        traceback.print_exc()
    os._exit(0)


def eventually(what: str, holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < until, what
        time.sleep(0.01)


def stat(pid: int) -> list[str]:
    """State, parent, group, session."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[:4]


# Descriptors of processes


def fdinfo(fd: int, name: str) -> str:
    with open(f"/proc/self/fdinfo/{fd}") as file:
        return next(line.split()[-1] for line in file if line.startswith(name))


def waits(fd: int, seconds: float = 0) -> bool:
    """Whether a pidfd's process has ended."""
    return bool(select.select([fd], [], [], seconds)[0])


def pidfd() -> Callable[[], None]:
    """Of a child, watched by an epoll set beside a pipe, as Go's os/exec and Python's PidfdChildWatcher have them."""
    child_pid = child()
    fd, epoll, pipe = os.pidfd_open(child_pid), select.epoll(), os.pipe()
    epoll.register(fd, select.EPOLLIN)
    epoll.register(pipe[0], select.EPOLLIN)
    at = [fd, child_pid]

    def check() -> None:
        assert fdinfo(at[0], "NSpid:") == str(at[1]), "another process's"
        assert not os.get_inheritable(at[0]), "it is close-on-exec"
        assert epoll.poll(0) == [], "nothing has ended"
        signal.pidfd_send_signal(at[0], signal.SIGKILL)
        assert epoll.poll(10) == [(at[0], select.EPOLLIN)], "its end is an event"
        done = os.waitid(os.P_PIDFD, at[0], os.WEXITED)
        assert done and done.si_pid == at[1], done
        os.close(at[0])
        at[1] = child()
        at[0] = os.pidfd_open(at[1])
        epoll.register(at[0], select.EPOLLIN)

    return check


def pidfds() -> Callable[[], None]:
    """Of a process of each relation: itself, pid 1, a brother's child, one that has ended, one whose parent has not asked yet, and one
    that a child has inherited."""
    told, tell = os.pipe()

    def brother() -> None:
        os.write(tell, b"%d\n" % child())
        rest()

    child(brother)
    nephew = int(os.read(told, 20))
    gone, zombie = child(lambda: None), child(lambda: None)
    fds = {name: os.pidfd_open(pid) for name, pid in {
        "self": os.getpid(), "init": 1, "nephew": nephew, "gone": gone, "zombie": zombie}.items()}  # fmt: skip
    again = os.dup(fds["gone"])
    os.set_inheritable(fds["nephew"], True)
    os.waitpid(gone, 0)
    os.waitid(os.P_PID, zombie, os.WEXITED | os.WNOWAIT)
    ask, answer = os.pipe(), os.pipe()

    def heir() -> None:
        while os.read(ask[0], 1):
            signal.pidfd_send_signal(fds["nephew"], 0)
            os.write(answer[1], b"y" if fdinfo(fds["nephew"], "NSpid:") == str(nephew) else b"n")

    child(heir)

    def check() -> None:
        for name, pid in {"self": os.getpid(), "init": 1, "nephew": nephew, "gone": -1, "zombie": zombie}.items():
            assert fdinfo(fds[name], "NSpid:") == str(pid), name
            assert waits(fds[name]) == (name in ("gone", "zombie")), name
        assert waits(again), "another descriptor of it"
        try:
            signal.pidfd_send_signal(fds["gone"], 0)
            raise AssertionError("it takes signals again")
        except ProcessLookupError:
            pass
        assert os.get_inheritable(fds["nephew"]) and not os.get_inheritable(fds["self"])
        assert os.waitid(os.P_PIDFD, fds["zombie"], os.WEXITED | os.WNOWAIT).si_pid == zombie  # type: ignore[union-attr]
        os.write(ask[1], b"?")
        assert os.read(answer[0], 1) == b"y", "what a child inherited"

    return check


def watcher() -> Callable[[], None]:
    """asyncio's PidfdChildWatcher, whose loop runs in a thread."""
    import asyncio

    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    watch = asyncio.PidfdChildWatcher()
    watch.attach_loop(loop)
    asyncio.get_event_loop_policy().set_child_watcher(watch)
    threading.Thread(target=loop.run_forever, daemon=True).start()

    def run(what):  # type: ignore[no-untyped-def]
        return asyncio.run_coroutine_threadsafe(what, loop).result(20)

    at = [run(asyncio.create_subprocess_exec("sleep", "1000"))]

    def check() -> None:
        at[0].terminate()
        assert run(at[0].wait()) == -signal.SIGTERM
        at[0] = run(asyncio.create_subprocess_exec("sleep", "1000"))

    return check


# System call filters


def install(refused: dict[int, int], flags: int = 0) -> None:
    """A filter that answers these calls with these words and allows all others."""
    code = struct.pack("<HBBI", 0x20, 0, 0, 0)
    for number, answer in refused.items():
        code += struct.pack("<HBBI", 0x15, 0, 1, number) + struct.pack("<HBBI", 0x06, 0, 0, answer)
    code += struct.pack("<HBBI", 0x06, 0, 0, 0x7FFF0000)
    kept = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("<HxxxxxxQ", len(code) // 8, ctypes.addressof(kept))
    assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    done = libc.syscall(SYS_seccomp, 1, flags, program)
    assert done == 0, (done, os.strerror(ctypes.get_errno()))


ERRNO, KILL = 0x00050000, 0x80000000


def fails(number: int, error: int) -> bool:
    ctypes.set_errno(0)
    return libc.syscall(number, 0, 0, 0) == -1 and ctypes.get_errno() == error


def seccomp() -> Callable[[], None]:
    """A filter of the program's own, in a child too, above that of its sandbox."""
    install({SYS_sched_yield: ERRNO | 77})
    ask, answer = os.pipe(), os.pipe()

    def heir() -> None:
        install({SYS_getpriority: ERRNO | 78})
        while os.read(ask[0], 1):
            both = fails(SYS_sched_yield, 77) and fails(SYS_getpriority, 78)
            os.write(answer[1], b"y" if both else b"n")

    child(heir)

    def check() -> None:
        assert fails(SYS_sched_yield, 77) and not fails(SYS_getpriority, 78)
        os.write(ask[1], b"?")
        assert os.read(answer[0], 1) == b"y", "a child's filters"

    return check


def strict() -> Callable[[], None]:
    """A filter that kills for what a restore does last: prctl, capset, membarrier, seccomp, munmap of others' memory."""
    ready, go = threading.Event(), threading.Event()
    seen: list[bool] = []

    def work() -> None:
        ready.set()
        while True:
            go.wait()
            go.clear()
            seen.append(fails(SYS_sched_yield, 79))

    threading.Thread(target=work, daemon=True).start()
    ready.wait()
    kills = {number: KILL for number in (157, 126, 324, SYS_seccomp, 101, 160, 302, 218, 273)}
    install({**kills, SYS_sched_yield: ERRNO | 79, 11: ERRNO | 1}, flags=1)

    def check() -> None:
        assert fails(SYS_sched_yield, 79) and fails(11, 1)
        go.set()
        eventually("a thread's filter", lambda: bool(seen))
        assert seen.pop()

    return check


def apart() -> Callable[[], None]:
    """Threads with different filters."""
    ready, go = threading.Event(), threading.Event()
    seen: list[bool] = []

    def work() -> None:
        install({SYS_sched_yield: ERRNO | 80})
        ready.set()
        while True:
            go.wait()
            go.clear()
            seen.append(fails(SYS_sched_yield, 80))

    threading.Thread(target=work, daemon=True).start()
    ready.wait()

    def check() -> None:
        assert not fails(SYS_sched_yield, 80)
        go.set()
        eventually("a thread's filter", lambda: bool(seen))
        assert seen.pop()

    return check


# Descriptors of /proc


def proc() -> Callable[[], None]:
    """Of itself and of another one."""
    other = child()
    paths = ["/proc/self/status", "/proc/self/maps", "/proc/self/fd", f"/proc/{other}/stat", f"/proc/{other}", "/proc/meminfo",
             "/proc/self/oom_score_adj", f"/proc/{other}/task", "/proc", "/proc/self/task/%d/comm" % os.getpid()]  # fmt: skip
    fds = {path: os.open(path, os.O_RDONLY) for path in paths}

    def check() -> None:
        status = os.pread(fds["/proc/self/status"], 4000, 0).decode()
        assert f"\nPid:\t{os.getpid()}\n" in status, status
        assert os.pread(fds["/proc/self/maps"], 100, 0)
        assert os.pread(fds[f"/proc/{other}/stat"], 100, 0).startswith(b"%d " % other)
        assert os.pread(fds["/proc/meminfo"], 100, 0).startswith(b"MemTotal")
        assert "maps" in os.listdir(fds[f"/proc/{other}"])
        assert str(fds["/proc"]) in os.listdir(fds["/proc/self/fd"])
        assert os.listdir(fds[f"/proc/{other}/task"]) == [str(other)]
        assert str(other) in os.listdir(fds["/proc"])

    return check


def proc_gone() -> Callable[[], None]:
    """Of a process that has ended: it gives an error, then and later."""
    gone = child()
    status, directory = os.open(f"/proc/{gone}/status", os.O_RDONLY), os.open(f"/proc/{gone}", os.O_RDONLY)
    os.kill(gone, signal.SIGKILL)
    os.waitpid(gone, 0)

    def check() -> None:
        for look in (lambda: os.pread(status, 10, 0), lambda: os.open("stat", os.O_RDONLY, dir_fd=directory)):
            try:
                raise AssertionError(f"it tells {look()!r}")
            except (ProcessLookupError, FileNotFoundError):
                pass

    return check


# Sessions and groups


def family(make: Callable[[Callable[[], None]], None]) -> Callable[[], None]:
    """Processes that `make` makes, each of which tells its pid by the function that it is given. They keep parent, group, session."""
    told, tell = os.pipe()
    make(lambda: os.write(tell, b"%d\n" % os.getpid()))
    os.close(tell)
    found: list[int] = []
    os.set_blocking(told, False)

    def all_are_there() -> bool:
        try:
            found.extend(int(pid) for pid in os.read(told, 1000).split())
        except BlockingIOError:
            pass
        return len(found) >= MEMBERS[KIND] and before() == before()

    def before() -> dict[int, list[str]]:
        return {pid: stat(pid)[1:] for pid in found}

    eventually("its processes are there", all_are_there)
    time.sleep(0.3)
    was = before()

    def check() -> None:
        now = before()
        assert now == was, f"parent, group and session were {was} and are {now}"
        for session in {int(ids[2]) for ids in was.values()}:
            assert any(os.getsid(pid) == session for pid in found)

    return check


def told_rest(tell: Callable[[], None]) -> None:
    tell()
    rest()


def led(what: Callable[[], None], leave: bool = True) -> None:
    """In a session of its own, whose leader ends at once."""

    def leader() -> None:
        os.setsid()
        child(what)
        if not leave:
            rest()

    pid = child(leader)
    if leave:
        os.waitpid(pid, 0)


def daemon() -> Callable[[], None]:
    """Forked twice: its session's leader has ended, pid 1 is its parent."""
    return family(lambda tell: led(lambda: told_rest(tell)))


def subreaper() -> Callable[[], None]:
    """The same below a process that takes orphans, as `tini -s` does; with a child and in a group of its own."""
    assert libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0

    def forked(tell: Callable[[], None]) -> None:
        def second() -> None:
            child(lambda: told_rest(tell))
            child(lambda: (os.setpgid(0, 0), told_rest(tell)))  # type: ignore[func-returns-value]
            told_rest(tell)

        led(second)

    return family(forked)


def before_setsid() -> Callable[[], None]:
    """A process that began a session after it had a child, in that of before; and the same where that one's leader has ended."""

    def made(tell: Callable[[], None]) -> None:
        def second() -> None:
            child(lambda: told_rest(tell))
            os.setsid()
            child(lambda: told_rest(tell))
            told_rest(tell)

        child(second)
        led(second)

    return family(made)


def group() -> Callable[[], None]:
    """Groups whose leaders have ended."""

    def made(tell: Callable[[], None]) -> None:
        def leader() -> None:
            os.setpgid(0, 0)
            child(lambda: told_rest(tell))
            child(lambda: (child(lambda: told_rest(tell)), told_rest(tell)))  # type: ignore[func-returns-value]

        pid = child(leader)
        os.waitpid(pid, 0)
        led(lambda: (child(leader), time.sleep(0.1), told_rest(tell)))  # type: ignore[func-returns-value]

    return family(made)


def adopted() -> Callable[[], None]:
    """An orphan in a session whose leader lives, elsewhere than below its new parent."""

    def made(tell: Callable[[], None]) -> None:
        def between() -> None:
            def leader() -> None:
                os.setsid()
                os.waitpid(child(lambda: child(lambda: told_rest(tell)) and None), 0)
                told_rest(tell)

            child(leader)
            told_rest(tell)

        child(between)

    return family(made)


MEMBERS = {"daemon": 1, "subreaper": 3, "before_setsid": 6, "group": 7, "adopted": 3}


# Programs


def memory_program() -> Callable[[], None]:
    """The program itself is run from a memory file."""
    if not os.readlink("/proc/self/exe").startswith("/memfd:"):
        program = os.memfd_create("program", os.MFD_CLOEXEC)
        with open("/usr/bin/python3", "rb") as source:
            while piece := source.read(1 << 20):
                os.write(program, piece)
        os.execve(program, ["python3", *sys.argv], dict(os.environ))

    def check() -> None:
        assert os.readlink("/proc/self/exe").startswith("/memfd:program"), os.readlink("/proc/self/exe")

    return check


def memory_program_open() -> Callable[[], None]:
    """The program itself is run from a memory file, which it has open as well, as a launcher that does not close it leaves it."""
    if not os.readlink("/proc/self/exe").startswith("/memfd:"):
        program = os.memfd_create("program", 0)
        with open("/usr/bin/python3", "rb") as source:
            while piece := source.read(1 << 20):
                os.write(program, piece)
        os.set_inheritable(program, True)
        os.execve(program, ["python3", *sys.argv, str(program)], dict(os.environ))
    program = int(sys.argv[-1])
    at = os.lseek(program, 100, os.SEEK_SET)

    def check() -> None:
        assert os.readlink("/proc/self/exe").startswith("/memfd:program"), os.readlink("/proc/self/exe")
        assert os.lseek(program, 0, os.SEEK_CUR) == at and os.pread(program, 4, 0) == b"\x7fELF"
        assert os.fstat(program).st_ino == os.stat("/proc/self/exe").st_ino

    return check


def memory_mapping() -> Callable[[], None]:
    """A sealed memory file, closed and mapped for itself alone in two processes, as libraries that were made at run time are: a
    page with a hole before it, and one that one of them has written to."""
    page, prot, map_private = 4096, 1 | 2, 2
    file = os.memfd_create("library", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.pwrite(file, b"b" * page, page)
    libc.fcntl(file, 1033, 2 | 4)  # F_ADD_SEALS: F_SEAL_SHRINK, F_SEAL_GROW
    libc.mmap.restype = ctypes.c_void_p
    address = libc.mmap(None, ctypes.c_size_t(2 * page), prot, map_private, file, ctypes.c_long(0))
    os.close(file)

    def holds(first: bytes, second: bytes) -> None:
        assert ctypes.string_at(address, 2 * page) == first * page + second * page
        with open("/proc/self/maps") as maps:
            [line] = [line for line in maps if line.startswith(f"{address:x}-")]
        assert "rw-p" in line and "/memfd:library" in line, line

    def other() -> None:
        ctypes.memset(address, ord("a"), page)
        while True:
            theirs.recv(1)
            holds(b"a", b"b")
            theirs.send(b"y")

    ours, theirs = socket.socketpair()
    child(other)
    theirs.close()

    def check() -> None:
        holds(b"\0", b"b")
        ours.send(b"?")
        assert ours.recv(1) == b"y"

    return check


def zombie_leader() -> Callable[[], None]:
    """A process whose first thread has ended while another goes on."""

    def work() -> None:
        threading.Thread(target=rest_in_thread).start()
        libc.syscall(60, 0)

    def rest_in_thread() -> None:
        while True:
            time.sleep(1000)

    pid = child(work)
    eventually("its first thread has ended", lambda: stat(pid)[0] == "Z")

    def check() -> None:
        assert stat(pid)[0] == "Z" and len(os.listdir(f"/proc/{pid}/task")) == 2

    return check


def corked() -> Callable[[], None]:
    """A datagram of which only the first part was given."""
    receiver, sender = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
    receiver.bind(("127.0.0.1", 0))
    sender.connect(receiver.getsockname())
    sender.send(b"first ", socket.MSG_MORE)

    def check() -> None:
        sender.send(b"last")
        assert receiver.recv(100) == b"first last"
        sender.send(b"first ", socket.MSG_MORE)

    return check


def passing() -> Callable[[], None]:
    """A socket on its way over another one."""
    ours, theirs = socket.socketpair()

    def send() -> None:
        a, b = socket.socketpair()
        with a, b:
            socket.send_fds(ours, [b"x"], [a.fileno()])
            b.sendall(b"inside")

    def check() -> None:
        _, fds, _, _ = socket.recv_fds(theirs, 1, 1)
        with socket.socket(fileno=fds[0]) as passed:
            assert passed.recv(100) == b"inside"
        send()

    send()
    return check


def waiting() -> Callable[[], None]:
    """A connection to a unix socket of its own that was not accepted yet."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\0waiting")
    listener.listen()

    def dial() -> socket.socket:
        dialled = socket.socket(socket.AF_UNIX)
        dialled.connect(listener.getsockname())
        dialled.sendall(b"said early")
        return dialled

    here = [dial()]

    def check() -> None:
        assert listener.accept()[0].recv(100) == b"said early"
        here[0] = dial()

    return check


def plain() -> Callable[[], None]:
    return lambda: None


KIND = sys.argv[1]


def main() -> None:
    check = globals()[KIND]()
    server = socket.create_server(("", 7000))
    print("ready", flush=True)
    while True:
        client, _ = server.accept()
        clients.append(client)
        try:
            check()
            client.sendall(b"ok\n")
        except BaseException as e:  # noqa: BLE001  (it is said to the test)
            traceback.print_exc()
            client.sendall(f"{type(e).__name__}: {e}\n".encode())
        clients.remove(client)
        client.close()


main()
