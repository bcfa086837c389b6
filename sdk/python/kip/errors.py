"""What can be wrong, one class for each code of the protocol."""

from __future__ import annotations


class KipError(Exception):
    """Something failed that should not have."""

    code = 0


class BadFrame(KipError):
    """The daemon could not read what was sent."""

    code = 1


class TooLarge(KipError):
    """A file or an answer is too long."""

    code = 2


class UnsupportedVersion(KipError):
    """The daemon does not speak this version of the protocol."""

    code = 3


class UnknownCall(KipError):
    """The daemon does not know the call."""

    code = 4


class Invalid(KipError):
    """A path, a name or a number is not valid."""

    code = 5


class NotFound(KipError):
    """There is no such node or lease."""

    code = 6


class Exists(KipError):
    """Something is at the path."""

    code = 7


class ConditionFailed(KipError):
    """A condition does not hold, or the node is not of that kind. Nothing was changed."""

    code = 8


class Unavailable(KipError):
    """The machine lacks something, now."""

    code = 9


class OutcomeUnknown(KipError):
    """The connection or the daemon ended while this was done: it may be done, or not."""

    code = 10


class TooMany(KipError):
    """Too many connections of the proc, or watches of a connection."""

    code = 11


class Denied(KipError):
    """The owner of the proc has not given it access to the name tree: `kip run --tree`."""

    code = 12


CODES = {
    each.code: each
    for each in (KipError, BadFrame, TooLarge, UnsupportedVersion, UnknownCall, Invalid, NotFound, Exists, ConditionFailed, Unavailable, OutcomeUnknown, TooMany, Denied)
}


def error(code: int, message: str) -> KipError:
    return CODES.get(code, KipError)(message)
