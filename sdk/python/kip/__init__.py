"""What a program inside a Kip proc says to Kip: who it is, the name tree, and procs that it spawns.

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
from .wire import (
    CREATED,
    EVICTED,
    EXITED,
    KILLED,
    LOST,
    MOVED,
    NEVER_STARTED,
    REMOVED,
    WRITTEN,
    Change,
    Changes,
    Fence,
    File,
    Identity,
    LeaseInfo,
    Node,
    Spawned,
    SpawnEnd,
)

__all__ = [
    "CREATED",
    "EVICTED",
    "EXITED",
    "KILLED",
    "LOST",
    "MOVED",
    "NEVER_STARTED",
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
    "SpawnEnd",
    "Spawned",
    "TooLarge",
    "TooMany",
    "Unavailable",
    "UnknownCall",
    "UnsupportedVersion",
    "Watch",
]
