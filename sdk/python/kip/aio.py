"""The client for asyncio: calls of several tasks go over one connection, and changes of watches, too."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from . import wire
from .calls import AGAIN_AFTER, GONE, PATH, TRIES, closed, lost, put_call, spawn_call, value_of

READ_BYTES = 64 << 10


class _Connection:
    """A greeted connection, and the task that reads it."""

    def __init__(self, sock: socket.socket):
        self.socket = sock
        self.last = 0
        self.sending = asyncio.Lock()
        self.waiting: dict[int, asyncio.Queue[wire.Answer | None]] = {}
        self.ended = False
        self.pid = os.getpid()
        self.reader = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, path: str) -> _Connection:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            await asyncio.get_running_loop().sock_connect(sock, path)
        except BaseException:
            sock.close()
            raise
        connection = cls(sock)
        try:
            number, answers = await connection.send(wire.Call(hello=wire.Hello(wire.VERSION)), None)
            value_of(await connection.answer(answers))
            del connection.waiting[number]
        except BaseException:
            connection.close()
            raise
        return connection

    async def send(self, call: wire.Call, descriptor: int | None) -> tuple[int, asyncio.Queue[wire.Answer | None]]:
        """The number of the call, and where its answers come."""
        loop = asyncio.get_running_loop()
        async with self.sending:
            if self.ended:
                raise EOFError("the daemon has closed the connection")
            self.last += 1
            number = call.id = self.last
            answers = self.waiting[number] = asyncio.Queue()
            frame = wire.frame(call)
            try:
                if descriptor is not None:
                    frame = frame[await self._send_first(frame, descriptor) :]
                await loop.sock_sendall(self.socket, frame)
            except BaseException:
                # Half a frame may be out.
                self.close()
                raise
            return number, answers

    async def _send_first(self, frame: bytes, descriptor: int) -> int:
        loop = asyncio.get_running_loop()
        while True:
            try:
                return socket.send_fds(self.socket, [frame], [descriptor])
            except BlockingIOError:
                writable: asyncio.Future[None] = loop.create_future()
                loop.add_writer(self.socket, lambda future=writable: future.done() or future.set_result(None))
                try:
                    await writable
                finally:
                    loop.remove_writer(self.socket)

    async def answer(self, answers: asyncio.Queue[wire.Answer | None]) -> wire.Answer:
        answer = await answers.get()
        if answer is None:
            raise EOFError("the daemon has closed the connection")
        return answer

    async def _read(self) -> None:
        loop, data = asyncio.get_running_loop(), bytearray()
        try:
            while part := await loop.sock_recv(self.socket, READ_BYTES):
                data += part
                while len(data) >= wire.HEAD.size:
                    (length,) = wire.HEAD.unpack_from(data)
                    end = wire.HEAD.size + length
                    if len(data) < end:
                        break
                    answer = wire.decode(wire.Answer, bytes(data[wire.HEAD.size : end]))
                    del data[:end]
                    # Without a number it is about the connection, and so about all calls.
                    for number, queue in self.waiting.items():
                        if answer.id in (number, 0):
                            queue.put_nowait(answer)
        except OSError:
            pass
        finally:
            self.ended = True
            for queue in self.waiting.values():
                queue.put_nowait(None)

    def close(self) -> None:
        self.ended = True
        self.reader.cancel()
        self.socket.close()


async def _connect(path: str) -> _Connection:
    """A connection that is greeted. The daemon may be ended while it greets one."""
    for _ in range(TRIES):
        try:
            return await _Connection.open(path)
        except GONE:
            await asyncio.sleep(AGAIN_AFTER)
    raise closed()


class AsyncWatch:
    """Changes as they come. Iterating waits for the next revision with changes; it goes on over lost connections, misses nothing
    and tells nothing twice."""

    def __init__(self, client: AsyncClient, node: str, only: bool):
        self._client, self._node, self._only = client, node, only
        # The revision after which changes come.
        self.revision = 0
        # Parts of a revision's changes of which another is to come.
        self._gathered: wire.Changes | None = None
        self._number = 0

    async def _begin(self, after: int | None) -> None:
        self._connection = await self._client._open()
        call = wire.Call(watch=wire.Watch(self._node, self._only, after))
        self._number, self._answers = await self._connection.send(call, None)
        first: wire.Changes = value_of(await self._connection.answer(self._answers))
        self.revision = first.revision if after is None else max(after, self.revision)

    def __aiter__(self) -> AsyncWatch:
        return self

    async def __anext__(self) -> wire.Changes:
        while True:
            try:
                changes: wire.Changes = value_of(await self._connection.answer(self._answers))
            except GONE:
                await self._begin(self.revision)
                continue
            # A daemon that was ended may have sent some that the next one sends again.
            if changes.revision > self.revision:
                self._gathered = changes.after(self._gathered)
                if changes.more:
                    continue
                self.revision, changes, self._gathered = changes.revision, self._gathered, None
                if changes.changes:
                    return changes

    async def close(self) -> None:
        """Ends the watch; nothing of it comes any more."""
        self._connection.waiting.pop(self._number, None)
        if not self._connection.ended:
            await self._client._ask(wire.Call(unwatch=wire.Unwatch(self._number)))

    async def __aenter__(self) -> AsyncWatch:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncClient:
    """What Kip is asked from inside a proc, by tasks."""

    def __init__(self, path: str = PATH):
        self._path = path
        self._connection: _Connection | None = None
        self._opening: asyncio.Lock | None = None

    async def _open(self) -> _Connection:
        self._opening = self._opening or asyncio.Lock()
        async with self._opening:
            if self._connection is None or self._connection.ended or self._connection.pid != os.getpid():
                if self._connection is not None:
                    self._connection.close()
                self._connection = await _connect(self._path)
            return self._connection

    async def _ask(self, call: wire.Call, descriptor: int | None = None) -> Any:
        while True:
            connection = await self._open()
            number = 0
            try:
                number, answers = await connection.send(call, descriptor)
                return value_of(await connection.answer(answers))
            except GONE as gone:
                if number and call.name() not in wire.Call.REPEATABLE:
                    raise lost(call) from gone
            finally:
                connection.waiting.pop(number, None)

    async def close(self) -> None:
        """Closes the connection; the next call makes another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def whoami(self) -> wire.Identity:
        """Which proc this is."""
        return await self._ask(wire.Call(whoami=wire.Whoami()))

    async def stat(self, path: str) -> wire.Node:
        """A node, without its contents."""
        return await self._ask(wire.Call(stat=wire.Stat(path)))

    async def ls(self, path: str) -> list[wire.Node]:
        """The nodes of a directory, by their names."""
        nodes: list[wire.Node] = []
        while True:
            after = nodes[-1].path.rpartition("/")[2] if nodes else ""
            page: wire.Nodes = await self._ask(wire.Call(list=wire.List(path, after)))
            nodes += page.nodes
            if not page.more:
                return nodes

    async def read(self, path: str) -> wire.File:
        """A file with its contents."""
        return await self._ask(wire.Call(get=wire.Get(path)))

    async def get(self, path: str) -> bytes:
        """The contents of a file."""
        return (await self.read(path)).contents

    async def put(
        self, path: str, contents: bytes, *, new: bool = False, version: int | None = None, lease: int | None = None, fence: wire.Fence | None = None
    ) -> wire.Node:
        """Makes a file, or gives it other contents, as `Client.put` does."""
        call, descriptor = put_call(path, contents, new, version, lease, fence)
        try:
            return await self._ask(call, descriptor)
        finally:
            if descriptor is not None:
                os.close(descriptor)

    async def mkdir(self, path: str, *, fence: wire.Fence | None = None) -> wire.Node:
        """Makes a directory."""
        return await self._ask(wire.Call(mkdir=wire.Mkdir(path, fence)))

    async def rm(self, path: str, *, version: int | None = None, fence: wire.Fence | None = None) -> None:
        """Removes a file or an empty directory."""
        await self._ask(wire.Call(rm=wire.Rm(path, version, fence)))

    async def mv(self, source: str, to: str, *, replace: bool = False, fence: wire.Fence | None = None) -> wire.Node:
        """Moves a file, or a directory with all that is in it."""
        return await self._ask(wire.Call(mv=wire.Mv(source, to, replace, fence)))

    async def watch(self, path: str, *, only: bool = False, after: int | None = None) -> AsyncWatch:
        """Changes of a node and of all below it, from now on or after that revision."""
        watch = AsyncWatch(self, path, only)
        await watch._begin(after)
        return watch

    async def grant(self, ttl_ms: int, *, with_proc: bool = False) -> wire.LeaseInfo:
        """A lease, as `Client.grant` makes one."""
        return await self._ask(wire.Call(grant=wire.Grant(ttl_ms, with_proc)))

    async def keep(self, lease: int) -> wire.LeaseInfo:
        """Gives a lease its whole time again."""
        return await self._ask(wire.Call(keep=wire.Keep(lease)))

    async def revoke(self, lease: int) -> None:
        """Ends a lease, and its files with it."""
        await self._ask(wire.Call(revoke=wire.Revoke(lease)))

    async def leases(self) -> list[wire.LeaseInfo]:
        """The leases of the realm."""
        return (await self._ask(wire.Call(leases=wire.Leases()))).leases

    async def spawn(
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
        return (await self._ask(call)).name

    async def wait_start(self, name: str) -> wire.Spawned:
        """Waits until a spawned proc has started, or has ended before that."""
        return await self._ask(wire.Call(wait=wire.Await(name, wire.START)))

    async def wait_exit(self, name: str) -> wire.SpawnEnd:
        """Waits until a spawned proc has ended: how, or why there is no exit status. One whose end is kept no more raises `NotFound`."""
        spawned: wire.Spawned = await self._ask(wire.Call(wait=wire.Await(name, wire.EXIT)))
        return spawned.end or wire.SpawnEnd(wire.LOST, message="the daemon says no end")

    async def started(self) -> None:
        """Says that this proc, a spawned one, has started."""
        await self._ask(wire.Call(started=wire.Started()))

    async def exited(self, status: int, message: str = "") -> None:
        """Says with which status this proc, a spawned one, is about to end, and a line about it. Its program then ends by itself."""
        await self._ask(wire.Call(exited=wire.Exited(status, message)))

    async def evict(self, name: str, reason: str = "", *, grace_ms: int | None = None) -> wire.Spawned:
        """Has a spawned proc end."""
        return await self._ask(wire.Call(evict=wire.Evict(name, reason, grace_ms)))

    async def wait_evict(self) -> str:
        """Waits until this proc, a spawned one, is to end, and returns why. From now on it gets no signal for that: what is left of the
        grace is its program's to end in."""
        spawned: wire.Spawned = await self._ask(wire.Call(wait=wire.Await("", wire.EVICT)))
        return spawned.evicted or ""
