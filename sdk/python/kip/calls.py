"""Calls and their answers, the same for both clients."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from . import wire
from .errors import KipError, OutcomeUnknown, Unavailable, error

# Where the socket is in each proc.
PATH = "/run/kip/runtime"
# Contents that are longer go by a descriptor: a message of a client has at most 64 KiB.
INLINE = 60 << 10
# What a socket says that has no other side any more.
GONE = (BrokenPipeError, ConnectionResetError, ConnectionAbortedError, EOFError)
# So often is a connection made that ends before it is greeted, so many seconds apart.
TRIES, AGAIN_AFTER = 5, 0.1


def put_call(path: str, contents: bytes, new: bool, version: int | None, lease: int | None, fence: wire.Fence | None) -> tuple[wire.Call, int | None]:
    """The call, and the descriptor that goes with it, which is the caller's to close."""
    put = wire.Put(path=path, new=new, version=version, lease=lease, fence=fence)
    if len(contents) <= INLINE:
        put.contents = contents
        return wire.Call(put=put), None
    descriptor = os.memfd_create("kip-put", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(contents)
    except BaseException:
        os.close(descriptor)
        raise
    put.in_descriptor = True
    return wire.Call(put=put), descriptor


def spawn_call(
    command: Sequence[str],
    env: Mapping[str, str] | None,
    workdir: str,
    best_effort: bool,
    cpus: float | None,
    memory_bytes: int | None,
    domain: str,
    detached: bool,
    says_started: bool,
    light: bool,
) -> wire.Call:
    variables = [wire.Variable(name, value) for name, value in (env or {}).items()]
    milli = None if cpus is None else round(cpus * 1000)
    return wire.Call(spawn=wire.Spawn(list(command), variables, workdir, best_effort, milli, memory_bytes, domain, detached, says_started, light))


def value_of(answer: wire.Answer) -> Any:
    """The answer's value, or its failure as an exception."""
    if answer.failure is not None:
        raise error(answer.failure.code, answer.failure.message)
    value = answer.value()
    if value is None:
        raise KipError("an answer of the daemon is of a kind that this client does not know")
    return value


def lost(call: wire.Call) -> OutcomeUnknown:
    return OutcomeUnknown(f"the connection ended before {call.name()} was answered: it may be done, or not")


def closed() -> Unavailable:
    return Unavailable("the daemon closes connections of this proc before it has greeted them")
