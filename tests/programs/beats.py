"""Says at each beat of a periodic timer of that kind, by SECONDS, when it is by CLOCK_REALTIME."""

import ctypes
import os
import select
import signal
import sys
import time

kind, every = sys.argv[1], float(sys.argv[2])
libc = ctypes.CDLL(None, use_errno=True)


class Spec(ctypes.Structure):
    """struct itimerspec."""

    _fields_ = (("every_s", ctypes.c_long), ("every_ns", ctypes.c_long), ("first_s", ctypes.c_long), ("first_ns", ctypes.c_long))


def beat(*_: object) -> None:
    print(f"{time.time():.6f}", flush=True)


nanoseconds = int(every * 1e9)
spec = Spec(*divmod(nanoseconds, 10**9), *divmod(nanoseconds, 10**9))
signal.signal(signal.SIGALRM, beat)
if kind == "timerfd":
    timer = libc.timerfd_create(time.CLOCK_MONOTONIC, 0)
    libc.timerfd_settime(timer, 0, ctypes.byref(spec), None)
    while True:
        select.select([timer], [], [])
        os.read(timer, 8)
        beat()
elif kind == "setitimer":
    signal.setitimer(signal.ITIMER_REAL, every, every)
elif kind == "timer_create":
    ident = ctypes.c_void_p()
    assert libc.timer_create(time.CLOCK_MONOTONIC, None, ctypes.byref(ident)) == 0
    assert libc.timer_settime(ident, 0, ctypes.byref(spec), None) == 0
while True:
    signal.pause()
