"""What a program inside a Kip proc says to Kip: who it is, and the name tree.

    import kip

    with kip.Client() as client:
        print(client.whoami().name)
        client.put("/services/web", b"10.0.0.7:80")

`kip.AsyncClient` is the same for asyncio. A call that fails raises a `kip.KipError` of the kind that says why.
"""

from .aio import AsyncClient, AsyncWatch
from .client import Client, Watch
from .errors import (
    BadFrame,
    ConditionFailed,
    Denied,
    Exists,
    Invalid,
    KipError,
    NotFound,
    OutcomeUnknown,
    TooLarge,
    TooMany,
    Unavailable,
    UnknownCall,
    UnsupportedVersion,
)
from .wire import CREATED, MOVED, REMOVED, WRITTEN, Change, Changes, Fence, File, Identity, LeaseInfo, Node

__all__ = [
    "CREATED",
    "MOVED",
    "REMOVED",
    "WRITTEN",
    "AsyncClient",
    "AsyncWatch",
    "BadFrame",
    "Change",
    "Changes",
    "Client",
    "ConditionFailed",
    "Denied",
    "Exists",
    "Fence",
    "File",
    "Identity",
    "Invalid",
    "KipError",
    "LeaseInfo",
    "Node",
    "NotFound",
    "OutcomeUnknown",
    "TooLarge",
    "TooMany",
    "Unavailable",
    "UnknownCall",
    "UnsupportedVersion",
    "Watch",
]
