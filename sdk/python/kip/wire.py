"""Messages of the runtime socket: protocol buffers, as docs/runtime.md has them, and nothing else of that format."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, ClassVar, TypeVar, get_type_hints

VERSION = 1
HEAD = struct.Struct("<I")
# The wire types of protocol buffers.
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5

T = TypeVar("T", bound="Message")


class BadMessage(ValueError):
    """Bytes that are no message of this protocol."""


def number(of: int, default: Any = None, factory: Any = None) -> Any:
    """A field of a message with that number."""
    if factory is not None:
        return field(default_factory=factory, metadata={"number": of})
    return field(default=default, metadata={"number": of})


@dataclass
class Message:
    """What has numbered fields: numbers, flags, texts, bytes, messages and lists of messages."""


@cache
def plan(of: type[Message]) -> list[tuple[int, str, Any]]:
    """Number, name and type of each field."""
    hints = get_type_hints(of)
    return [(each.metadata["number"], each.name, hints[each.name]) for each in fields(of)]


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise BadMessage("a number ends too soon or is too long")
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def encode(message: Message) -> bytes:
    out = bytearray()
    for tag, name, _ in plan(type(message)):
        value = getattr(message, name)
        if isinstance(value, list):
            # Each of them is there, also an empty text.
            out += b"".join(encode_field(tag, one) or varint(tag << 3 | BYTES) + b"\0" for one in value)
        else:
            out += encode_field(tag, value)
    return bytes(out)


def encode_field(tag: int, value: Any) -> bytes:
    """What is not there has no bytes: None, and what an absent field reads as."""
    if value is None or value is False or value in ("", b""):
        return b""
    if isinstance(value, int):
        return varint(tag << 3 | VARINT) + varint(int(value))
    body = encode(value) if isinstance(value, Message) else value.encode() if isinstance(value, str) else bytes(value)
    return varint(tag << 3 | BYTES) + varint(len(body)) + body


def decode(of: type[T], data: bytes) -> T:
    known = {tag: (name, kind) for tag, name, kind in plan(of)}
    values: dict[str, Any] = {}
    at = 0
    while at < len(data):
        key, at = read_varint(data, at)
        tag, wire = key >> 3, key & 7
        value: Any
        if wire == VARINT:
            value, at = read_varint(data, at)
        elif wire == BYTES:
            length, at = read_varint(data, at)
            if at + length > len(data):
                raise BadMessage("a field ends after its message")
            value, at = data[at : at + length], at + length
        elif wire in (FIXED64, FIXED32):
            at += 8 if wire == FIXED64 else 4
            continue
        else:
            raise BadMessage(f"a field of wire type {wire}")
        # What a newer daemon says beside is left out.
        if tag in known:
            name, kind = known[tag]
            put(values, name, kind, value)
    return of(**values)


def put(values: dict[str, Any], name: str, kind: Any, value: Any) -> None:
    text = str(kind)
    inner = next((each for each in getattr(kind, "__args__", ()) if isinstance(each, type) and issubclass(each, Message)), None)
    if inner is not None and isinstance(value, bytes):
        message = decode(inner, value)
        if text.startswith("list"):
            values.setdefault(name, []).append(message)
        else:
            values[name] = message
    elif kind is bool:
        values[name] = bool(value)
    elif "str" in text and isinstance(value, bytes):
        values[name] = value.decode()
    else:
        values[name] = value


@dataclass
class Fence(Message):
    """A condition of a write: the node at `path` has been there since the revision `epoch`, which is its `created`."""

    path: str = number(1, "")
    epoch: int = number(2, 0)


@dataclass
class Hello(Message):
    version: int = number(1, 0)


@dataclass
class Whoami(Message):
    pass


@dataclass
class Stat(Message):
    path: str = number(1, "")


@dataclass
class List(Message):
    path: str = number(1, "")
    after: str = number(2, "")


@dataclass
class Get(Message):
    path: str = number(1, "")


@dataclass
class Put(Message):
    path: str = number(1, "")
    contents: bytes = number(2, b"")
    in_descriptor: bool = number(3, False)
    version: int | None = number(4)
    new: bool = number(5, False)
    lease: int | None = number(6)
    fence: Fence | None = number(7)


@dataclass
class Mkdir(Message):
    path: str = number(1, "")
    fence: Fence | None = number(2)


@dataclass
class Rm(Message):
    path: str = number(1, "")
    version: int | None = number(2)
    fence: Fence | None = number(3)


@dataclass
class Mv(Message):
    source: str = number(1, "")
    to: str = number(2, "")
    replace: bool = number(3, False)
    fence: Fence | None = number(4)


@dataclass
class Watch(Message):
    path: str = number(1, "")
    only: bool = number(2, False)
    after: int | None = number(3)


@dataclass
class Unwatch(Message):
    watch: int = number(1, 0)


@dataclass
class Grant(Message):
    ttl_ms: int = number(1, 0)
    with_proc: bool = number(2, False)


@dataclass
class Keep(Message):
    lease: int = number(1, 0)


@dataclass
class Revoke(Message):
    lease: int = number(1, 0)


@dataclass
class Leases(Message):
    pass


@dataclass
class Variable(Message):
    name: str = number(1, "")
    value: str = number(2, "")


@dataclass
class Spawn(Message):
    command: list[str] = number(1, factory=list)
    env: list[Variable] = number(2, factory=list)
    workdir: str = number(3, "")
    best_effort: bool = number(4, False)
    cpus_milli: int | None = number(5)
    memory_bytes: int | None = number(6)
    domain: str = number(7, "")
    detached: bool = number(8, False)
    says_started: bool = number(9, False)
    light: bool = number(10, False)


START, EXIT, EVICT = range(3)


@dataclass
class Await(Message):
    name: str = number(1, "")
    moment: int = number(2, 0)


@dataclass
class Started(Message):
    pass


@dataclass
class Exited(Message):
    status: int = number(1, 0)
    message: str = number(2, "")


@dataclass
class Evict(Message):
    name: str = number(1, "")
    reason: str = number(2, "")
    grace_ms: int | None = number(3)


@dataclass
class Call(Message):
    """What a client says: a number of its own, and one call."""

    id: int = number(1, 0)
    hello: Hello | None = number(2)
    whoami: Whoami | None = number(3)
    stat: Stat | None = number(4)
    list: List | None = number(5)
    get: Get | None = number(6)
    put: Put | None = number(7)
    mkdir: Mkdir | None = number(8)
    rm: Rm | None = number(9)
    mv: Mv | None = number(10)
    watch: Watch | None = number(11)
    unwatch: Unwatch | None = number(12)
    grant: Grant | None = number(13)
    keep: Keep | None = number(14)
    revoke: Revoke | None = number(15)
    leases: Leases | None = number(16)
    spawn: Spawn | None = number(17)
    wait: Await | None = number(18)
    started: Started | None = number(19)
    exited: Exited | None = number(20)
    evict: Evict | None = number(21)
    # Calls that change nothing, or the same each time, may be asked again.
    REPEATABLE: ClassVar[frozenset[str]] = frozenset({"hello", "whoami", "stat", "list", "get", "watch", "unwatch", "keep", "leases", "wait", "started", "exited", "evict"})

    def name(self) -> str:
        return next(name for _, name, _ in plan(Call)[1:] if getattr(self, name) is not None)


@dataclass
class Failure(Message):
    code: int = number(1, 0)
    message: str = number(2, "")


@dataclass
class Welcome(Message):
    version: int = number(1, 0)
    most_call_bytes: int = number(2, 0)
    most_answer_bytes: int = number(3, 0)


@dataclass
class Identity(Message):
    """Which proc this is: its name, its realm, the newest snapshot that it was woken from, and the count of
    /run/kip/generation-id, which is higher in a clone."""

    name: str = number(1, "")
    realm: str = number(2, "")
    generation: int = number(3, 0)
    clone_count: int = number(4, 0)


@dataclass
class Node(Message):
    """A file or a directory, without contents. No two states of a path have the same `version`; `created` is the epoch of its path."""

    path: str = number(1, "")
    directory: bool = number(2, False)
    size: int = number(3, 0)
    version: int = number(4, 0)
    created: int = number(5, 0)
    lease: int | None = number(6)


@dataclass
class Nodes(Message):
    nodes: list[Node] = number(1, factory=list)
    more: bool = number(2, False)


@dataclass
class File(Message):
    """A file with its contents."""

    node: Node | None = number(1)
    contents: bytes = number(2, b"")


@dataclass
class Done(Message):
    pass


CREATED, WRITTEN, REMOVED, MOVED = range(4)


@dataclass
class Change(Message):
    """What happened to a node; `kind` is CREATED, WRITTEN, REMOVED or MOVED."""

    kind: int = number(1, 0)
    path: str = number(2, "")
    source: str | None = number(3)
    node: Node | None = number(4)


@dataclass
class Changes(Message):
    """All changes of one revision of the tree. They come in parts, numbered from 0, where one answer is too short for them:
    `more` says that another part comes."""

    revision: int = number(1, 0)
    changes: list[Change] = number(2, factory=list)
    part: int = number(3, 0)
    more: bool = number(4, False)

    def after(self, gathered: Changes | None) -> Changes:
        """These and the parts before them; part 0 begins anew."""
        earlier = gathered.changes if gathered is not None and self.part > 0 else []
        return Changes(self.revision, earlier + self.changes, 0, self.more)


@dataclass
class LeaseInfo(Message):
    """A lease: its number, the time that each keep-alive gives it, and what is left of that."""

    id: int = number(1, 0)
    ttl_ms: int = number(2, 0)
    left_ms: int = number(3, 0)


@dataclass
class LeaseList(Message):
    leases: list[LeaseInfo] = number(1, factory=list)


EXITED, KILLED, EVICTED, NEVER_STARTED, LOST = range(5)


@dataclass
class SpawnEnd(Message):
    """Why a spawned proc is no more: EXITED with `exit_code`, KILLED by `signal`, EVICTED, NEVER_STARTED or LOST; the `status` and the
    `message` that its program has said, or more about the end."""

    why: int = number(1, 0)
    exit_code: int | None = number(2)
    signal: int | None = number(3)
    status: int | None = number(4)
    message: str = number(5, "")


@dataclass
class Spawned(Message):
    """A spawned proc: whether it has started, why it is to end if it is, and its end."""

    name: str = number(1, "")
    started: bool = number(2, False)
    evicted: str | None = number(3)
    end: SpawnEnd | None = number(4)


@dataclass
class Answer(Message):
    """What the daemon says: the number of the call, and one answer."""

    id: int = number(1, 0)
    failure: Failure | None = number(2)
    welcome: Welcome | None = number(3)
    identity: Identity | None = number(4)
    node: Node | None = number(5)
    nodes: Nodes | None = number(6)
    file: File | None = number(7)
    done: Done | None = number(8)
    changes: Changes | None = number(9)
    lease: LeaseInfo | None = number(10)
    leases: LeaseList | None = number(11)
    spawned: Spawned | None = number(12)

    def value(self) -> Any:
        return next((value for _, name, _ in plan(Answer)[1:] if (value := getattr(self, name)) is not None), None)


def frame(call: Call) -> bytes:
    body = encode(call)
    return HEAD.pack(len(body)) + body
