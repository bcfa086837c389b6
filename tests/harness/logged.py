"""Lines of the daemon's log at WARN and ERROR that tests may cause, each by its text. A test expects those of what it does; any
other line fails it (harness/kip.py)."""

SNAPSHOT_UNUSABLE = "its snapshot cannot be used"
NOT_NATIVE = "native restore failed; CRIU restores the proc"
NO_HELPER = "no CRIU helper can be started now"
NOT_HIBERNATED = "not hibernated"
FETCHED_AGAIN = "what came from the store is lost on the local disk: it is fetched again"
LAUNCHER_DIED = "kip-launch has died; starting another"
KEEPER_DIED = "the keeper died; starting another"
NO_PAGER = "there is no pager"
LOST_BY_REBOOT = "what a sleeper held is lost and cannot be made anew"
STAYS_IN_STORE = "what is not needed any more stays in the store"

# The keeper is killed, at any moment: what was asked of it then was not done.
KEEPER_KILLED = [
    KEEPER_DIED,
    "the keeper did not let mounts go",
    "the keeper did not let sockets go",
    "the keeper did not close kernel objects that CRIU restores",
    "the keeper may not hold what the pager has",
    "the new keeper does not hold everything",
    "the new keeper does not hold what the pager has",
]
# The machine, or keeper and daemon, ended.
KEEPER_GONE = ["the keeper was not running: connections of procs that were parked are lost", "its output is lost", LOST_BY_REBOOT]
# The pager is killed: what was asked of it is done by the next.
PAGER_KILLED = [
    NO_PAGER,
    NOT_HIBERNATED,
    "a held proc is let go",
    "a held proc is not woken yet",
    "a hibernated proc is not woken",
    "the pager does not forget it",
    "the proc's paged-out memory cannot be adopted yet; the proc waits",
    "what it had out is not taken up: it waits",
]
# The daemon is killed, at any moment: what it had begun is ended by the next.
DAEMON_KILLED = [
    FETCHED_AGAIN,
    "a dump or restore of the last daemon does not end; its processes are ended",
    "helpers of the last daemon do not come to their end; they are ended",
    "a rehearsal is left; the next daemon removes it",
    "it is left to the next daemon",
    "a snapshot that was called off is left on disk",
    "sockets of a snapshot that was called off stay with the keeper",
    "an archived generation is left on disk",
    "an old generation is left on disk",
    "an unfinished generation is left on disk",
    "a start that was cut off is not undone whole",
    "what CRIU had begun is not ended whole",
    "what was half made is not ended whole",
    "something of a stopped proc is left",
]
