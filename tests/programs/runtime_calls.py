"""Carries out calls for the conformance tests of the SDKs: a line of its input is a call and its arguments in JSON, answered with its value
or the number of its error. `sync` or `asyncio` says by which client; the package lies beside it."""

import asyncio
import json
import socket
import sys
from dataclasses import asdict

import kip


def lease(of):
    return {"id": of.id, "ttl_ms": of.ttl_ms}


def plain(value):
    """An answer as the table has it."""
    match value:
        case kip.Node() | kip.SpawnEnd():
            return asdict(value)
        case kip.Spawned():
            return {"name": value.name, "started": value.started, "evicted": value.evicted}
        case kip.LeaseInfo():
            return lease(value)
        case kip.Identity():
            return {"name": value.name, "realm": value.realm, "clone_count": value.clone_count}
        case kip.Changes():
            return [[change.kind, change.path] for change in value.changes]
        case bytes():
            return value.decode()
        case list():
            return [one.path if isinstance(one, kip.Node) else lease(one) for one in value]
        case _:
            return value


class Sync:
    """By the client for threads."""

    def __init__(self):
        self.client = kip.Client()
        self.watches = {}

    def call(self, name, *words, **named):
        if name == "watch":
            self.watches[words[0]] = self.client.watch(*words, **named)
            return None
        if name == "next":
            return next(self.watches[words[0]])
        return getattr(self.client, name)(*words, **named)


class Asyncio(Sync):
    """By that for asyncio."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.client = kip.AsyncClient()
        self.watches = {}

    async def ask(self, name, *words, **named):
        if name == "watch":
            self.watches[words[0]] = await self.client.watch(*words, **named)
            return None
        if name == "next":
            return await anext(self.watches[words[0]])
        return await getattr(self.client, name)(*words, **named)

    def call(self, name, *words, **named):
        return self.loop.run_until_complete(self.ask(name, *words, **named))


WORDS = {"mv": ("path", "to"), "grant": ("ttl_ms",), "keep": ("lease",), "revoke": ("lease",), "whoami": (), "leases": (), "spawn": ("command",), "wait_start": ("name",),
         "wait_exit": ("name",), "started": (), "exited": ("status",), "evict": ("name", "reason"), "wait_evict": ()}


def answer(clients, asked):
    name = asked.pop("call")
    if name == "put":
        asked["contents"] = (asked.pop("text", "") * asked.pop("times", 1)).encode()
    if "fence" in asked:
        asked["fence"] = kip.Fence(**asked["fence"])
    words = [asked.pop(word) for word in WORDS.get(name, ("path",))]
    try:
        return {"ok": plain(clients.call(name, *words, **asked))}
    except kip.KipError as error:
        return {"error": error.code}


clients = Asyncio() if sys.argv[2] == "asyncio" else Sync()
listener = socket.create_server(("0.0.0.0", int(sys.argv[1])))
while True:
    client, _ = listener.accept()
    with client, client.makefile("rw") as lines:
        for line in lines:
            lines.write(json.dumps(answer(clients, json.loads(line))) + "\n")
            lines.flush()
