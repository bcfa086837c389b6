"""What has no name any more: deleted files, FIFOs, directories and sockets, opened once and several times, shared and not, over many
sleeps and by both engines."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from harness.clients import Lines
from harness.kip import Kip
from harness.programs import SOURCES
from harness.rows import rest_in_soak

# An array of bytes that is a mapping of a file: flags and protection as mmap(2) has them.
MAPPED = (
    "import ctypes; libc = ctypes.CDLL(None); libc.mmap.restype = ctypes.c_void_p; "
    "mapped = lambda fd, flags, protection: (ctypes.c_ubyte * 8192).from_address("
    "libc.mmap(None, ctypes.c_size_t(8192), protection, flags, fd, ctypes.c_long(0))); "
)

# Each: how it is made, and an expression that uses all of it, leaves something for the next time
# and is always `True`.
KINDS = {
    "fifo opened for both": (
        "os.mkfifo('/tmp/n'); a = os.open('/tmp/n', os.O_RDWR); os.unlink('/tmp/n'); os.write(a, b'left')",
        "(os.read(a, 9), os.write(a, b'left')) == (b'left', 4)",
    ),
    "fifo of two ends": (
        "os.mkfifo('/tmp/n'); r = os.open('/tmp/n', os.O_RDONLY | os.O_NONBLOCK); w = os.open('/tmp/n', os.O_WRONLY); "
        "os.unlink('/tmp/n'); os.write(w, b'left'); import fcntl",
        "(os.read(r, 9), os.write(w, b'left'), fcntl.fcntl(r, 3) & os.O_NONBLOCK, fcntl.fcntl(w, 3) & os.O_NONBLOCK) "
        "== (b'left', 4, os.O_NONBLOCK, 0)",
    ),
    "fifo opened twice, and copied": (
        "os.mkfifo('/tmp/n'); a = os.open('/tmp/n', os.O_RDWR); b = os.open('/tmp/n', os.O_RDWR); c = os.dup(a); os.unlink('/tmp/n'); "
        "import fcntl",
        "(fcntl.fcntl(a, 4, os.O_NONBLOCK), fcntl.fcntl(c, 3) & os.O_NONBLOCK, fcntl.fcntl(b, 3) & os.O_NONBLOCK, "
        "fcntl.fcntl(a, 4, 0), os.write(b, b'x'), os.read(c, 9)) == (0, os.O_NONBLOCK, 0, 0, 1, b'x')",
    ),
    "fifo whose writer has gone": (
        "import select; os.mkfifo('/tmp/n'); r = os.open('/tmp/n', os.O_RDONLY | os.O_NONBLOCK); "
        "w = os.open('/tmp/n', os.O_WRONLY); os.close(w); os.unlink('/tmp/n'); p = select.poll(); p.register(r, 0)",
        "[event & select.POLLHUP for _, event in p.poll(0)] == [select.POLLHUP] and os.read(r, 9) == b''",
    ),
    "fifo in an epoll set": (
        "import select; os.mkfifo('/tmp/n'); a = os.open('/tmp/n', os.O_RDWR); os.unlink('/tmp/n'); "
        "e = select.epoll(); e.register(a, select.EPOLLIN)",
        "(e.poll(0), os.write(a, b'x'), [fd for fd, _ in e.poll(5)], os.read(a, 9), e.poll(0)) == ([], 1, [a], b'x', [])",
    ),
    "file": (
        "a = os.open('/tmp/n', os.O_RDWR | os.O_CREAT); os.unlink('/tmp/n'); os.write(a, b'left')",
        "(os.pread(a, 9, 0), os.lseek(a, 0, 1), os.fstat(a).st_nlink) == (b'left', 4, 0)",
    ),
    "file opened twice, and copied": (
        "a = os.open('/tmp/n', os.O_RDWR | os.O_CREAT); b = os.open('/tmp/n', os.O_RDONLY); c = os.dup(a); os.unlink('/tmp/n')",
        "(os.ftruncate(a, 0), os.pwrite(a, b'one', 0), os.lseek(b, 0, 0), os.read(b, 9), os.lseek(a, 2, 0), os.lseek(c, 0, 1), "
        "os.lseek(b, 0, 1)) == (None, 3, 0, b'one', 2, 2, 3)",
    ),
    "file of two names, one deleted": (
        "a = os.open('/tmp/n', os.O_RDWR | os.O_CREAT); os.link('/tmp/n', '/tmp/kept'); os.unlink('/tmp/n')",
        "(os.ftruncate(a, 0), os.pwrite(a, b'one', 0), open('/tmp/kept').read(), os.fstat(a).st_nlink) == (None, 3, 'one', 1)",
    ),
    "locked file": (
        "import fcntl; a = os.open('/tmp/n', os.O_RDWR | os.O_CREAT); b = os.open('/tmp/n', os.O_RDWR); os.unlink('/tmp/n'); "
        "fcntl.flock(a, fcntl.LOCK_EX); refused = lambda: [fcntl.flock(b, fcntl.LOCK_EX | fcntl.LOCK_NB)]",
        "refused()",
    ),
    "directory": (
        "os.mkdir('/tmp/n'); a = os.open('/tmp/n', os.O_RDONLY); os.rmdir('/tmp/n')",
        "(os.listdir(a), os.path.exists('/tmp/n')) == ([], False)",
    ),
    "file that is only mapped, by two": (
        MAPPED + "a = os.open('/tmp/n', os.O_RDWR | os.O_CREAT); os.ftruncate(a, 9000); os.pwrite(a, b'left', 5000); "
        "m, w = mapped(a, 1, 3), mapped(a, 1, 3); os.close(a); os.unlink('/tmp/n')",
        "(m[5000:5004], w.__setitem__(5004, m[5004] + 1), m[5004] == w[5004]) == ([108, 101, 102, 116], None, True)",
    ),
    "file that is mapped and open": (
        MAPPED + "a = os.open('/tmp/n', os.O_RDWR | os.O_CREAT); os.ftruncate(a, 9000); os.pwrite(a, b'left', 5000); "
        "b = os.open('/tmp/n', os.O_RDONLY); m = mapped(a, 1, 3); own = mapped(b, 2, 3); own[1] = 7; os.unlink('/tmp/n')",
        "(m[5000:5004], m.__setitem__(0, m[0] + 1), os.pread(b, 1, 0)[0] == m[0], own[0:2], os.lseek(a, 0, 1)) "
        "== ([108, 101, 102, 116], None, True, [0, 7], 0)",
    ),
    "file that is only mapped, and changed for itself": (
        MAPPED + "a = os.open('/tmp/n', os.O_RDWR | os.O_CREAT); os.ftruncate(a, 9000); os.pwrite(a, b'left', 5000); "
        "m = mapped(a, 2, 3); m[1] = 7; os.close(a); os.unlink('/tmp/n')",
        "(m[5000:5004], m[0:3], m.__setitem__(5, m[5] + 1)) == ([108, 101, 102, 116], [0, 7, 0], None)",
    ),
    "file that is only mapped, in memory": (
        MAPPED + "a = os.open('/dev/shm/n', os.O_RDWR | os.O_CREAT); os.ftruncate(a, 33); os.pwrite(a, b'left', 29); "
        "m = mapped(a, 1, 1); w = mapped(a, 1, 3); os.close(a); os.unlink('/dev/shm/n')",
        "(m[29:33], w.__setitem__(0, m[0] + 1), m[0] == w[0]) == ([108, 101, 102, 116], None, True)",
    ),
    "semaphore of two processes": (
        "import multiprocessing, threading; fork = multiprocessing.get_context('fork'); there, back = fork.Semaphore(0), fork.Semaphore(0); "
        "p = fork.Process(target=lambda: [back.release() for _ in iter(there.acquire, None)], daemon=True); p.start()",
        "(there.release(), back.acquire(timeout=5), back.acquire(False)) == (None, True, False)",
    ),
    "library": (
        "import ctypes, ctypes.util, shutil; z = shutil.copy('/usr/lib/x86_64-linux-gnu/' + ctypes.util.find_library('z'), '/tmp/n'); "
        "z = ctypes.CDLL(z); os.unlink('/tmp/n')",
        "z.crc32(0, b'left', 4) & 0xffffffff == __import__('zlib').crc32(b'left')",
    ),
    "memory file": (
        "a = os.memfd_create('n'); os.write(a, b'left')",
        "(os.pread(a, 9, 0), os.lseek(a, 0, 1), os.readlink(f'/proc/self/fd/{a}')) == (b'left', 4, '/memfd:n (deleted)')",
    ),
    "memory file opened twice, copied and mapped": (
        MAPPED + "a = os.memfd_create('n'); os.ftruncate(a, 20000); b = os.open(f'/proc/self/fd/{a}', os.O_RDONLY); c = os.dup(a); "
        "os.pwrite(a, b'left', 5000); m = mapped(a, 1, 3)",
        "(m[5000:5004], m.__setitem__(0, m[0] + 1), os.pread(b, 1, 0)[0] == m[0], os.lseek(a, 7, 0), os.lseek(c, 0, 1), "
        "os.lseek(b, 0, 1), os.fstat(b).st_size) == ([108, 101, 102, 116], None, True, 7, 7, 0, 20000)",
    ),
    "memory file of two processes": (
        MAPPED + "a = os.memfd_create('n'); os.ftruncate(a, 8192); m = mapped(a, 1, 3); r, w = os.pipe(); back, there = os.pipe(); "
        "other = lambda: [os.write(there, os.pwrite(a, bytes([(m[0] + 1) % 256]), 0) * b'x') for _ in iter(lambda: os.read(r, 1), b'')]; "
        "os.fork() or other(); step = lambda before: (os.write(w, b'x'), os.read(back, 1), m[0] == (before + 1) % 256)",
        "step(m[0]) == (1, b'x', True)",
    ),
    "memory file that is mapped for itself, too": (
        MAPPED + "a = os.memfd_create('n'); os.ftruncate(a, 9000); os.pwrite(a, b'left', 5000); m = mapped(a, 2, 3); m[1] = 7; w = mapped(a, 1, 3)",
        "(m[5000:5004], m[0:3], w[0:3], w.__setitem__(6000, w[6000] + 1), os.pread(a, 1, 6000)[0] == w[6000]) "
        "== ([108, 101, 102, 116], [0, 7, 0], [0, 0, 0], None, True)",
    ),
    "sealed memory file": (
        MAPPED + "import fcntl; a = os.memfd_create('n', os.MFD_ALLOW_SEALING); os.write(a, b'left'); "
        "fcntl.fcntl(a, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK); m = mapped(a, 2, 1)",
        "(os.pread(a, 9, 0), fcntl.fcntl(a, fcntl.F_GET_SEALS), m[0:4]) "
        "== (b'left', fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK, [108, 101, 102, 116])",
    ),
    "memory file that can be no program": (
        "import fcntl; a = os.memfd_create('n', 8); os.write(a, b'left')",
        "(os.pread(a, 9, 0), fcntl.fcntl(a, fcntl.F_GET_SEALS), os.pwrite(a, b'L', 0) and os.pwrite(a, b'l', 0), os.fstat(a).st_mode & 0o777) "
        "== (b'left', 0x20, 1, 0o666)",
    ),
    "empty memory file": (MAPPED + "a = os.memfd_create('n'); m = mapped(a, 1, 3)", "os.fstat(a).st_size == 0"),
    "memory file that is mapped beyond its end": (
        MAPPED + "a, b = os.memfd_create('n'), os.memfd_create('n'); os.ftruncate(a, 4096); os.ftruncate(b, 8192); m, w = mapped(a, 1, 3), mapped(b, 1, 3)",
        "(os.ftruncate(a, 8192), m.__setitem__(5000, m[5000] + 1), os.pread(a, 1, 5000)[0] == m[5000], w[5000], os.ftruncate(a, 4096)) "
        "== (None, None, True, 0, None)",
    ),
    "memory file that may only be read": (
        MAPPED + "a = os.memfd_create('n'); os.write(a, b'left'); b = os.open(f'/proc/self/fd/{a}', os.O_RDONLY); m = mapped(b, 1, 1); "
        "libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]",
        "(m[0:4], libc.mprotect(ctypes.addressof(m), 4096, 3)) == ([108, 101, 102, 116], -1)",
    ),
    "semaphore of two processes, by its name": (
        "import multiprocessing; lock = multiprocessing.get_context('spawn').Semaphore(2); r, w = os.pipe(); back, there = os.pipe(); "
        "other = lambda: [os.write(there, b'%d' % (lock.acquire(False) and not lock.release())) for _ in iter(lambda: os.read(r, 1), b'')]; "
        "os.fork() or other(); asked = lambda: (os.write(w, b'x'), os.read(back, 1))[1]; others = lambda: "
        "[name for name in os.listdir('/dev/shm') if not name.startswith('sem.mp-')]",
        "(asked(), lock.acquire(False), lock.acquire(False), asked(), lock.release(), lock.release(), asked(), others()) "
        "== (b'1', True, True, b'0', None, None, b'1', [])",
    ),
    "listening socket": (
        "l = socket.socket(socket.AF_UNIX); l.bind('/tmp/n'); l.listen(); c = socket.socket(socket.AF_UNIX); c.connect('/tmp/n'); "
        "s, _ = l.accept(); os.unlink('/tmp/n'); c.sendall(b'left')",
        "(s.recv(9), c.sendall(b'left'), l.getsockname(), os.path.exists('/tmp/n')) == (b'left', None, '/tmp/n', False)",
    ),
}
# In turns a plan is made of what CRIU has restored, and CRIU dumps what a plan has.
SLEEPS = {"plan": 2, "criu": 2, "turns": 3}


# To a directory without a name no handle leads.
BY_CRIU = {"directory"}


# promise waking: what has no name any more, opened once and several times, shared or not, in an
#   epoll set, locked, mapped: files, FIFOs, directories, sockets, memory files; over several
#   sleeps, by each engine and in turns
# held by: this, `kip_engine::wake::reopen::tests::both_ends_of_a_fifo_with_what_is_in_it`,
#   `kip_engine::wake::reopen::tests::a_reader_knows_of_the_end_or_does_not`
@pytest.mark.parametrize("engine", rest_in_soak(["plan", "criu", "turns"], ["turns"]))
def test_what_has_no_name(fresh_kip: Callable[..., Kip], engine: str) -> None:
    """One proc for each kind, so that a refusal of one hides no other."""
    kip = fresh_kip(*(["--only-criu"] if engine == "criu" else []))
    flags = ["-v", f"{SOURCES / 'lines.py'}:/srv/lines.py:ro"]
    by_plan = set()
    for number, (kind, (make, use)) in enumerate(KINDS.items()):
        proc = kip.run(f"n{number}", ["/usr/bin/python3", "/srv/lines.py", "8080"], ports=[8080], flags=flags)
        client = Lines(proc.port())
        assert client.ask(make) == "None", kind
        expected = client.ask(use)
        assert expected in ("True", "BlockingIOError: [Errno 11] Resource temporarily unavailable"), (kind, expected)
        for cycle in range(SLEEPS[engine]):
            proc.sleep()
            if engine == "turns" and cycle % 2:
                generation = proc.inspect()["generation"]
                (kip.data / "procs" / proc.name / f"gen-{generation}" / "wake.plan").unlink(missing_ok=True)
            assert client.ask(use) == expected, (kind, cycle)
            if proc.rebuilt():
                by_plan.add((kind, cycle))
        proc.remove()
    planned = {"plan": range(SLEEPS["plan"]), "criu": [], "turns": range(0, SLEEPS["turns"], 2)}[engine]
    assert by_plan == {(kind, cycle) for kind in KINDS.keys() - BY_CRIU for cycle in planned}
