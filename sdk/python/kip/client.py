"""The client for threads: each call waits for its answer."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from . import wire
from .calls import AGAIN_AFTER, GONE, PATH, TRIES, closed, lost, put_call, spawn_call, value_of
from .errors import KipError


class Connection:
    """A greeted connection, for one thread at a time."""

    def __init__(self, path: str):
        self.pid = os.getpid()
        self.last = 0
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self.socket.connect(path)
            self.send(wire.Call(hello=wire.Hello(wire.VERSION)), None)
            value_of(self.answer(self.last))
        except BaseException:
            self.socket.close()
            raise

    def send(self, call: wire.Call, descriptor: int | None) -> int:
        self.last += 1
        call.id = self.last
        frame = wire.frame(call)
        sent = socket.send_fds(self.socket, [frame], [descriptor]) if descriptor is not None else 0
        self.socket.sendall(frame[sent:])
        return call.id

    def receive(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            part = self.socket.recv(count - len(data))
            if not part:
                raise EOFError("the daemon has closed the connection")
            data += part
        return bytes(data)

    def next(self) -> wire.Answer:
        (length,) = wire.HEAD.unpack(self.receive(wire.HEAD.size))
        return wire.decode(wire.Answer, self.receive(length))

    def answer(self, of: int) -> wire.Answer:
        while True:
            answer = self.next()
            # Another number is of a call of before: the daemon was ended after it had answered.
            if answer.id in (of, 0):
                return answer

    def is_stale(self) -> bool:
        """Whether it ended, or is that of the process that this one was forked from."""
        if self.pid != os.getpid():
            return True
        poll = select.poll()
        poll.register(self.socket, select.POLLRDHUP)
        return bool(poll.poll(0))

    def is_closed(self) -> bool:
        return self.socket.fileno() < 0

    def close(self) -> None:
        self.socket.close()


def connect(path: str) -> Connection:
    """A connection that is greeted. The daemon may be ended while it greets one."""
    for _ in range(TRIES):
        try:
            return Connection(path)
        except GONE:
            time.sleep(AGAIN_AFTER)
    raise closed()


class Watch:
    """Changes as they come, from a connection of its own. Iterating waits for the next revision with changes; it goes on over
    lost connections, misses nothing and tells nothing twice."""

    def __init__(self, path: str, node: str, only: bool, after: int | None):
        self._path, self._node, self._only = path, node, only
        # The revision after which changes come.
        self.revision = 0
        self._connection: Connection | None = None
        # Parts of a revision's changes of which another is to come.
        self._gathered: wire.Changes | None = None
        self._begin(after)

    def _begin(self, after: int | None) -> None:
        self._connection = connect(self._path)
        call = wire.Call(watch=wire.Watch(self._node, self._only, after))
        self._id = self._connection.send(call, None)
        first: wire.Changes = value_of(self._connection.answer(self._id))
        self.revision = first.revision if after is None else max(after, self.revision)

    def fileno(self) -> int:
        """The descriptor that is readable when a change may have come."""
        assert self._connection, "the watch is closed"
        return self._connection.socket.fileno()

    def __iter__(self) -> Iterator[wire.Changes]:
        return self

    def __next__(self) -> wire.Changes:
        while True:
            if self._connection is None:
                raise StopIteration
            try:
                if self._connection.is_closed():
                    self._begin(self.revision)
                changes: wire.Changes = value_of(self._connection.answer(self._id))
            except GONE:
                self._connection.close()
                continue
            except KipError:
                raise
            except BaseException:
                # Interrupted, in the middle of an answer maybe: the next call watches anew.
                self._connection.close()
                raise
            # A daemon that was ended may have sent some that the next one sends again.
            if changes.revision > self.revision:
                self._gathered = changes.after(self._gathered)
                if changes.more:
                    continue
                self.revision, changes, self._gathered = changes.revision, self._gathered, None
                if changes.changes:
                    return changes

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Client:
    """What Kip is asked from inside a proc. Threads may share one: their calls come one after the other."""

    def __init__(self, path: str = PATH):
        self._path = path
        self._lock = threading.Lock()
        self._connection: Connection | None = None

    def _ask(self, call: wire.Call, descriptor: int | None = None) -> Any:
        with self._lock:
            while True:
                if self._connection is None or self._connection.is_stale():
                    self.close()
                    self._connection = connect(self._path)
                try:
                    return value_of(self._connection.answer(self._connection.send(call, descriptor)))
                except GONE as gone:
                    self.close()
                    if call.name() not in wire.Call.REPEATABLE:
                        raise lost(call) from gone
                except KipError:
                    raise
                except BaseException:
                    # Interrupted: the answer may still come, and would be taken for another one.
                    self.close()
                    raise

    def _wait(self, call: wire.Call) -> Any:
        """By a connection of its own, so that calls of other threads do not wait, too."""
        while True:
            connection = connect(self._path)
            try:
                return value_of(connection.answer(connection.send(call, None)))
            except GONE:
                pass
            finally:
                connection.close()

    def close(self) -> None:
        """Closes the connection; the next call makes another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def whoami(self) -> wire.Identity:
        """Which proc this is."""
        return self._ask(wire.Call(whoami=wire.Whoami()))

    def stat(self, path: str) -> wire.Node:
        """A node, without its contents."""
        return self._ask(wire.Call(stat=wire.Stat(path)))

    def ls(self, path: str) -> list[wire.Node]:
        """The nodes of a directory, by their names."""
        nodes: list[wire.Node] = []
        while True:
            after = nodes[-1].path.rpartition("/")[2] if nodes else ""
            page: wire.Nodes = self._ask(wire.Call(list=wire.List(path, after)))
            nodes += page.nodes
            if not page.more:
                return nodes

    def read(self, path: str) -> wire.File:
        """A file with its contents."""
        return self._ask(wire.Call(get=wire.Get(path)))

    def get(self, path: str) -> bytes:
        """The contents of a file."""
        return self.read(path).contents

    def put(
        self, path: str, contents: bytes, *, new: bool = False, version: int | None = None, lease: int | None = None, fence: wire.Fence | None = None
    ) -> wire.Node:
        """Makes a file, or gives it other contents. With `new` there must be nothing at the path, with `version` that state of it;
        a file with a lease goes with it."""
        call, descriptor = put_call(path, contents, new, version, lease, fence)
        try:
            return self._ask(call, descriptor)
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def mkdir(self, path: str, *, fence: wire.Fence | None = None) -> wire.Node:
        """Makes a directory."""
        return self._ask(wire.Call(mkdir=wire.Mkdir(path, fence)))

    def rm(self, path: str, *, version: int | None = None, fence: wire.Fence | None = None) -> None:
        """Removes a file or an empty directory."""
        self._ask(wire.Call(rm=wire.Rm(path, version, fence)))

    def mv(self, source: str, to: str, *, replace: bool = False, fence: wire.Fence | None = None) -> wire.Node:
        """Moves a file, or a directory with all that is in it."""
        return self._ask(wire.Call(mv=wire.Mv(source, to, replace, fence)))

    def watch(self, path: str, *, only: bool = False, after: int | None = None) -> Watch:
        """Changes of a node and of all below it, from now on or after that revision."""
        return Watch(self._path, path, only, after)

    def grant(self, ttl_ms: int, *, with_proc: bool = False) -> wire.LeaseInfo:
        """A lease, which ends with the proc at the latest. While the proc sleeps Kip keeps it alive; with `with_proc` also while it
        runs, so that nothing else has to."""
        return self._ask(wire.Call(grant=wire.Grant(ttl_ms, with_proc)))

    def keep(self, lease: int) -> wire.LeaseInfo:
        """Gives a lease its whole time again."""
        return self._ask(wire.Call(keep=wire.Keep(lease)))

    def revoke(self, lease: int) -> None:
        """Ends a lease, and its files with it."""
        self._ask(wire.Call(revoke=wire.Revoke(lease)))

    def leases(self) -> list[wire.LeaseInfo]:
        """The leases of the realm."""
        return self._ask(wire.Call(leases=wire.Leases())).leases

    def spawn(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        workdir: str = "",
        best_effort: bool = False,
        cpus: float | None = None,
        memory_bytes: int | None = None,
        domain: str = "",
        detached: bool = False,
        says_started: bool = False,
        light: bool = False,
    ) -> str:
        """Spawns a child of this proc, and returns its name when it is recorded. It ends with this proc unless `detached`; with
        `says_started` it has started when it calls `started`. Not latency-critical but `best_effort`, it has the CPUs that others leave.
        With `light` it has the light sandbox, else that of this proc."""
        call = spawn_call(command, env, workdir, best_effort, cpus, memory_bytes, domain, detached, says_started, light)
        return (self._ask(call)).name

    def wait_start(self, name: str) -> wire.Spawned:
        """Waits until a spawned proc has started, or has ended before that."""
        return self._wait(wire.Call(wait=wire.Await(name, wire.START)))

    def wait_exit(self, name: str) -> wire.SpawnEnd:
        """Waits until a spawned proc has ended: how, or why there is no exit status. One whose end is kept no more raises `NotFound`."""
        spawned: wire.Spawned = self._wait(wire.Call(wait=wire.Await(name, wire.EXIT)))
        return spawned.end or wire.SpawnEnd(wire.LOST, message="the daemon says no end")

    def started(self) -> None:
        """Says that this proc, a spawned one, has started."""
        self._ask(wire.Call(started=wire.Started()))

    def exited(self, status: int, message: str = "") -> None:
        """Says with which status this proc, a spawned one, is about to end, and a line about it. Its program then ends by itself."""
        self._ask(wire.Call(exited=wire.Exited(status, message)))

    def evict(self, name: str, reason: str = "", *, grace_ms: int | None = None) -> wire.Spawned:
        """Has a spawned proc end."""
        return self._ask(wire.Call(evict=wire.Evict(name, reason, grace_ms)))

    def wait_evict(self) -> str:
        """Waits until this proc, a spawned one, is to end, and returns why. From now on it gets no signal for that: what is left of the
        grace is its program's to end in."""
        spawned: wire.Spawned = self._wait(wire.Call(wait=wire.Await("", wire.EVICT)))
        return spawned.evicted or ""
