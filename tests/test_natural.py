"""Natural runs: programs with timers, supervisors, pings and keep-alive time-outs of their own, with all of Kip's defaults.

All run side by side, each with its client or its jobs. No test here says `kip sleep`: they sleep because they are idle, at
least six times, and wake for what comes. A request that is lost or late, a worker that its supervisor kills, a job that is
not on its time is a failure. In the short run, which is part of `make test`, all are hibernated; in the long one, of `make soak`, one
whose clients are away for long enough is parked as well."""

from __future__ import annotations

import base64
import ftplib
import io
import itertools
import os
import re
import select
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from harness import programs
from harness.clients import Http, Redis, http_get
from harness.kip import Kip, Proc, daemon
from harness.wait import wait_for

SOURCES = programs.SOURCES / "natural"
MODULES = Path(__file__).parents[1] / ".kip" / "npm" / "node_modules"
# By default a proc sleeps after 10 s; then a client that pauses this long finds it asleep each
# time, also where the program has work of its own for some seconds after a request, as a JVM does.
PAUSE = 15.0
# An answer that takes longer than this is late. A JVM's or Erlang's wake from disk is the longest.
ANSWER = 1.0
# How long a short sleep took too long, whenever that is longer than ever before.
NOISE = """
import time
worst = 0
while True:
    began = time.monotonic()
    time.sleep(0.02)
    late = time.monotonic() - began - 0.02
    if late > worst:
        worst = late
        print(worst, flush=True)
"""
# A timer that is later than this, and what the machine itself is late, is late.
TIMER = 0.05
SLEEPS = 6


@dataclass
class Run:
    """One run of all of them."""

    until: float
    # A proc that is never idle and measures how late the machine itself is for it.
    noise: Proc
    # Seconds of the longest timer.
    long: float

    def left(self) -> float:
        return self.until - time.monotonic()

    def pause(self, seconds: float = PAUSE) -> bool:
        """Waits; false once the run is over."""
        time.sleep(max(0.0, min(seconds, self.left())))
        return self.left() > 0

    def late(self) -> float:
        """How late the machine is at most: a program, the pager and the reader of the program's time each wait for it."""
        return 3 * max(map(float, self.noise.logs().split()))

    def timer(self) -> float:
        """How late a timer may be."""
        return TIMER + self.late()


@dataclass(frozen=True)
class Natural:
    """A program and its clients."""

    name: str
    command: list[str]
    drive: Callable[[Proc, Run], None]
    port: int | None = None
    files: Mapping[str, bytes | str | Path] = field(default_factory=dict)
    sleeps: int = SLEEPS
    # So many of its sleeps are on disk.
    parks: int = 0


# Clients.


def closed_by_peer(connection: Http) -> bool:
    return connection.sock is None or bool(select.select([connection.sock], [], [], 0)[0])


def pooled(port: int, run: Run, count: int = 4, pause: float = PAUSE) -> None:
    """A pool of connections as clients have it: one that the server has closed meanwhile is replaced before it is used."""
    # A program's first answer loads what it needs.
    http_get(port)
    pool: list[Http | None] = [None] * count
    took = []
    while True:
        for place, connection in enumerate(pool):
            if connection is None or closed_by_peer(connection):
                if connection is not None:
                    connection.close()
                connection = pool[place] = Http(port)
            began = time.monotonic()
            assert connection.get("/") == b"natural\n"
            took.append((time.monotonic() - began, time.strftime("%T")))
        if not run.pause(pause):
            break
    for connection in pool:
        if connection is not None:
            connection.close()
    assert max(took)[0] < ANSWER + run.late(), (sorted(took)[-5:], run.late())


def web(proc: Proc, run: Run) -> None:
    pooled(proc.port(), run)


def seldom(proc: Proc, run: Run) -> None:
    """Its clients are away for longer than it takes to be parked, 70 s, and than it keeps their connections, for which it wakes."""
    pooled(proc.port(), run, pause=AWAY)


# Seconds until each answer: a handler's that is at it when its proc falls asleep, and a long
# poll's.
HANDLED, POLLED = 13.5, 30


def slow(proc: Proc, run: Run) -> None:
    """Answers that take longer than a proc stays awake: it sleeps in the middle of each, and none is later than the machine is."""
    run.pause()
    late, ended = [], []
    for seconds in itertools.cycle([POLLED, HANDLED, HANDLED, HANDLED, HANDLED]):
        if run.left() < seconds + 1:
            break
        began = time.monotonic()
        assert http_get(proc.port(), f"/after/{seconds}", timeout=60) == b"natural\n"
        late.append(time.monotonic() - began - seconds)
        ended.append(int(time.time() * 1000))
    assert len(late) >= 5 and -0.01 < min(late), late
    # A connection and a timer, each of which a busy machine may hold up.
    assert max(late) < 2 * run.timer(), (late, ended, run.timer())


def on_time(times: list[float], every: float, run: Run, slack: float = 0.0) -> None:
    assert len(times) >= 3, times
    off = [b - a - every for a, b in itertools.pairwise(times)]
    assert max(map(abs, off)) < run.timer() + slack, (off, run.timer())


def lines_of(s: socket.socket, run: Run) -> Iterator[tuple[float, str]]:
    """Lines, and when each came."""
    text = b""
    while (left := run.left()) > 0:
        if select.select([s], [], [], left)[0]:
            piece = s.recv(4096)
            assert piece, "the server closed the connection"
            text += piece
            *whole, text = text.split(b"\n")
            for line in whole:
                yield time.monotonic(), line.decode(errors="replace").strip()


# Longer than the time after which a proc sleeps.
PING = 12.5
AWAY = 100.0


def events(proc: Proc, run: Run) -> None:
    """Server-sent events, of a server that sleeps before its client comes."""
    run.pause()
    with socket.create_connection(("127.0.0.1", proc.port()), 30) as s:
        s.sendall(b"GET /events HTTP/1.1\r\nHost: natural\r\n\r\n")
        on_time([at for at, line in lines_of(s, run) if line.startswith("data: ping")], PING, run)


def pings(proc: Proc, run: Run) -> None:
    """WebSocket's pings, each answered, of a server that sleeps before its client comes."""
    run.pause()
    with socket.create_connection(("127.0.0.1", proc.port()), 30) as s:
        key = base64.b64encode(os.urandom(16)).decode()
        s.sendall(
            f"GET / HTTP/1.1\r\nHost: natural\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: {key}\r\n"
            "Sec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        answer = b""
        while not answer.endswith(b"\r\n\r\n"):
            answer += s.recv(1)
        assert b" 101 " in answer, answer
        times = []
        while run.left() > 0:
            if select.select([s], [], [], max(0.0, run.left()))[0]:
                head = s.recv(2, socket.MSG_WAITALL)
                assert head[:1] == b"\x89", f"no ping: {head!r}"
                times.append(time.monotonic())
                said, mask = s.recv(head[1], socket.MSG_WAITALL), os.urandom(4)
                s.sendall(bytes([0x8A, 0x80 | len(said)]) + mask + bytes(b ^ mask[i % 4] for i, b in enumerate(said)))
        on_time(times, PING, run)


def long_timer(proc: Proc, run: Run) -> None:
    """A long timer beside an interval of a second, while clients come and go."""
    pooled(proc.port(), run)
    said = dict(line.split() for line in proc.logs().splitlines() if re.match(r"(began|ran) ", line))
    late = float(said["ran"]) - float(said["began"]) - run.long
    assert -0.01 < late < run.timer(), f"{late:.3f} s late"


def woken(proc: Proc, run: Run) -> None:
    """What has no clients is woken by its owner now and then, so that it sleeps anew."""
    while run.pause(PAUSE + 0.5):
        proc.wake()


def ran(text: str) -> list[float]:
    return [float(line.split()[1]) for line in text.splitlines() if line.startswith("ran ")]


def file(proc: Proc) -> str:
    return proc.exec("cat", "/srv/ran").stdout


def jobs(every: float, slack: float = 0.0, read: Callable[[Proc], str] = Proc.logs) -> Callable[[Proc, Run], None]:
    """A job every so many seconds; `slack` is how far its scheduler itself is off."""

    def drive(proc: Proc, run: Run) -> None:
        began = time.time()
        woken(proc, run)
        on_time([at for at in ran(read(proc)) if at > began], every, run, slack)

    return drive


def on_its_second(of: int, slack: float, read: Callable[[Proc], str]) -> Callable[[Proc, Run], None]:
    """A job whenever the clock's seconds are a multiple of `of`: none is left out, none is twice."""

    def drive(proc: Proc, run: Run) -> None:
        began = time.time()
        woken(proc, run)
        ended = time.time()
        times = [at for at in ran(read(proc)) if at > began]
        assert all(at % of < slack + run.timer() for at in times), times
        due = [n for n in range(int(began // of) + 1, int(ended // of) + 1) if n * of + slack + run.timer() < ended]
        seen = [int(at // of) for at in times]
        assert sorted(set(seen)) == sorted(seen), "one job twice"
        # A scheduler that jumps over a second by itself, though it was not late for its look.
        jumped = [line.split()[1:] for line in proc.logs().splitlines() if line.startswith("jumped ")]
        its_own = {int(second) // of for second, gap in jumped if int(second) % of == 0 and float(gap) < 1 + run.timer()}
        assert set(due) <= set(seen) | its_own, (due, seen, jumped)

    return drive


def redis(proc: Proc, run: Run) -> None:
    """A client that waits in BLPOP, and keys that expire, of which a subscriber is told."""
    # Both end at about the same time, so that it is idle for long enough in between.
    wait = expire = int(run.long / 3)
    waiting, setting, told = (Redis(proc.port(), timeout=60) for _ in range(3))
    assert setting.ask("CONFIG", "SET", "notify-keyspace-events", "Ex") == "OK"

    late: dict[str, list[float]] = {"BLPOP": [], "EX": []}

    def blocked() -> None:
        while run.left() > wait:
            began = time.monotonic()
            assert waiting.ask("BLPOP", "queue", str(wait)) is None
            late["BLPOP"].append(time.monotonic() - began - wait)

    def expired() -> None:
        told.ask("SUBSCRIBE", "__keyevent@0__:expired")
        while run.left() > expire + 1:
            began = time.monotonic()
            assert setting.ask("SET", "key", "value", "EX", str(expire)) == "OK"
            assert told.answer()[-1] == b"key"
            late["EX"].append(time.monotonic() - began - expire)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(blocked), pool.submit(expired)]:
            done.result()
    # It looks at clients that wait, and for keys that have expired, ten times a second.
    least, most = min(map(min, late.values())), max(map(max, late.values()))
    assert -0.01 < least and most < 0.2 + run.timer(), (late, run.timer())


def rabbit(proc: Proc, run: Run) -> None:
    words = ["/usr/bin/python3", SOURCES / "rabbit.py", str(proc.port()), str(PAUSE), str(run.left())]
    done = subprocess.run(words, capture_output=True, text=True, timeout=run.left() + 60)
    assert done.returncode == 0, done.stderr
    took = [float(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(took) >= SLEEPS and max(took) < ANSWER + run.late(), took


def login(proc: Proc) -> ftplib.FTP:
    session = ftplib.FTP(timeout=30)
    # What a client gets is what the program says, and that knows its own address only.
    session.trust_server_pasv_ipv4_address = True
    session.connect("127.0.0.1", proc.port())
    session.login("alice", "secret")
    return session


def ftp(proc: Proc, run: Run, pause: float = PAUSE) -> None:
    """One session of a user that PAM lets in: its two processes and the one that waits for clients sleep between two looks at it."""
    session, took = login(proc), []
    while True:
        began, got = time.monotonic(), io.BytesIO()
        assert session.nlst() == ["page"]
        session.retrbinary("RETR page", got.write)
        assert got.getvalue() == b"natural\n"
        took.append(time.monotonic() - began)
        if not run.pause(pause):
            break
    assert session.quit().startswith("221 ")
    # Three connections, each of which may find it asleep.
    assert max(took) < ANSWER + 3 * run.late(), (sorted(took)[-5:], run.late())


def ftp_seldom(proc: Proc, run: Run) -> None:
    """Its client is away for longer than it takes to be parked."""
    ftp(proc, run, AWAY)


# Programs.

# The password of a user of vsftpd's, crypt(5): "secret".
SECRET = "$6$kip$1nAMg835zTiw6WEo75zWV/hgIwMv7Hj0H96FwP7A8H2cpv1xB9AFniD7Gy./YeGPyScQZWn/BwgA7H8zaBfQT1"
WEB_PY = {"srv/web.py": SOURCES / "web.py"}


def modules(*names: str) -> dict[str, Path]:
    """Node's modules that scripts/setup has installed."""
    found = [p for name in names for p in sorted((MODULES / name).rglob("*")) if p.is_file()]
    return {f"srv/node_modules/{p.relative_to(MODULES)}": p for p in found}


HAPROXY = """
defaults
    mode http
    timeout client 20s
    timeout http-keep-alive KEPTs
    timeout connect 5s
    timeout server 20s
frontend natural
    bind :8000
    http-request return status 200 content-type text/plain string "natural\\n"
"""

def supervised(proc: Proc, run: Run) -> None:
    """Its master kills a worker that it has not heard of for its time-out: it says so."""
    pooled(proc.port(), run)
    assert "WORKER TIMEOUT" not in proc.logs(), proc.logs()


def gunicorn(name: str, *flags: str, drive: Callable[[Proc, Run], None] = supervised, sleeps: int = SLEEPS) -> Natural:
    command = ["gunicorn", "-b", "0.0.0.0:8000", "-w", "2", "--chdir", "/srv", *flags, "web:application"]
    return Natural(name, command, drive, 8000, WEB_PY, sleeps=sleeps)


def node(name: str, drive: Callable[[Proc, Run], None], long: float = 0, sleeps: int = SLEEPS) -> Natural:
    files = {"srv/web.js": SOURCES / "web.js", **modules("ws")}
    return Natural(name, ["node", "/srv/web.js", "8000", str(PING), str(long)], drive, 8000, files, sleeps=sleeps)


def jetty_files() -> dict[str, bytes | str | Path]:
    settings = {f"etc/jetty9/{p.name}": p for p in sorted(Path("/etc/jetty9").glob("*.xml"))}
    return {**settings, "srv/base/webapps/ROOT/index.html": "natural\n", "var/log/jetty9/": ""}


def vsftpd(name: str, drive: Callable[[Proc, Run], None], sleeps: int = SLEEPS, parks: int = 0) -> Natural:
    """As Debian's package comes, with a user. Its own filter of system calls is off by default: with that it ends at the first
    transfer, with Kip and without, 500 OOPS: priv_sock_get_cmd."""
    users = Path("/etc/passwd").read_text() + "alice:x:2000:2000::/home/alice:/bin/sh\n"
    files = {
        "etc/vsftpd.conf": Path("/etc/vsftpd.conf"), "etc/passwd": users, "etc/shadow": f"alice:{SECRET}:19000:0:99999:7:::\n",
        "run/vsftpd/empty/": "", "home/alice/page": "natural\n",
    }  # fmt: skip
    return Natural(name, ["/usr/sbin/vsftpd", "/etc/vsftpd.conf"], drive, 21, files, sleeps, parks)


def naturals(long: float) -> dict[str, Natural]:
    """`long`: seconds of the longest timer."""
    jetty = "java -Xmx64m -jar /usr/share/jetty9/start.jar jetty.home=/usr/share/jetty9 jetty.base=/srv/base --module=deploy,http"
    uvicorn = "python3 -m uvicorn --app-dir /srv --host 0.0.0.0 web:app"
    jobs_py = {"srv/jobs.py": SOURCES / "jobs.py"}
    cron_js = {"srv/cron.js": SOURCES / "cron.js", **modules("node-cron", "uuid")}
    crontab = "* * * * * root echo ran $(date +\\%s.\\%3N) >>/srv/ran\n"
    cron_files = {"etc/crontab": crontab, "etc/cron.d/": "", "var/spool/cron/crontabs/": "", "srv/ran": ""}
    redis_server = ["redis-server", "--save", "", "--protected-mode", "no"]
    celery = "redis-server --save '' >/dev/null & cd /srv && exec python3 -m celery -A tasks worker -B -c 1 -s /tmp/beat"
    celery_files = {"srv/tasks.py": SOURCES / "tasks.py", "srv/ran": ""}
    every = [
        # The first, for it takes longest to start.
        Natural("rabbitmq", ["rabbitmq-server"], rabbit, 5672, {"etc/rabbitmq/rabbitmq.conf": "loopback_users = none\n"}),
        gunicorn("gunicorn-sync", "-t", "5"),
        gunicorn("gunicorn-gthread", "-k", "gthread", "--threads", "4", "--keep-alive", "8"),
        Natural("uvicorn", uvicorn.split(), web, 8000, WEB_PY),
        node("node", web),
        node("node-timer", long_timer, long),
        # Five answers, and the sleep before the first of them.
        node("node-slow", slow, sleeps=5),
        gunicorn("gunicorn-slow", "-k", "gthread", "-t", "5", drive=slow, sleeps=5),
        Natural("uvicorn-slow", uvicorn.split(), slow, 8000, WEB_PY, sleeps=5),
        # Of two pings one is sent by a proc that sleeps on, from the pages that its interval keeps
        # in.
        node("node-events", events, sleeps=4),
        node("node-pings", pings, sleeps=4),
        Natural("haproxy", ["haproxy", "-db", "-f", "/srv/haproxy.cfg"], web, 8000, {"srv/haproxy.cfg": HAPROXY.replace("KEPT", "8")}),
        Natural("jetty", jetty.split(), web, 8080, jetty_files()),
        Natural("apscheduler", ["python3", "/srv/jobs.py", "apscheduler", "7"], jobs(7), files=jobs_py),
        # Its loop looks once a second.
        Natural("schedule", ["python3", "/srv/jobs.py", "schedule", "7"], jobs(7, 1.1), files=jobs_py),
        # The job goes through its broker and a pool of workers, each of which looks now and then.
        # They talk to each other all the while, so that the proc is never idle.
        Natural("celery", ["sh", "-c", celery], jobs(7, 1.0, file), files=celery_files, sleeps=0),
        Natural("node-cron", ["node", "/srv/cron.js", "*/15 * * * * *"], on_its_second(15, 1.1, Proc.logs), files=cron_js),
        # It looks a second after each minute has begun.
        Natural("cron", ["cron", "-f"], on_its_second(60, 2.5, file), files=cron_files),
        # It answers from the pages that its ten ticks a second keep in, and sleeps on.
        Natural("redis", redis_server, redis, 6379, sleeps=1),
        vsftpd("vsftpd", ftp),
    ]
    if long > AWAY:
        files = {"srv/haproxy.cfg": HAPROXY.replace("KEPT", "90")}
        every.append(Natural("haproxy-seldom", ["haproxy", "-db", "-f", "/srv/haproxy.cfg"], seldom, 8000, files, parks=SLEEPS))
        every.append(vsftpd("vsftpd-seldom", ftp_seldom, parks=SLEEPS))
    return {natural.name: natural for natural in every}


SHORT, LONG = naturals(45), naturals(300)


def start(kip: Kip, natural: Natural, directory: Path) -> Proc:
    tar = programs.tarball(directory / f"{natural.name}.tar", natural.files) if natural.files else None
    ports = [natural.port] if natural.port else []
    return kip.run(natural.name, natural.command, ports=ports, tar=tar, timeout=120)


def drive(natural: Natural, proc: Proc, run: Run, after: float) -> None:
    time.sleep(after)
    natural.drive(proc, run)


def all_run(request: pytest.FixtureRequest, directory: Path, those: Mapping[str, Natural], seconds: float, long: float) -> Iterator[Callable[[str], None]]:
    """Runs all of them that are to be judged and gives the judge: it raises what went wrong with the one that is named."""
    of_module = [item for item in request.session.items if item.path == request.path]
    chosen = {item.callspec.params["name"] for item in of_module if isinstance(item, pytest.Function)}
    with ExitStack() as stack:
        kip = stack.enter_context(daemon())
        with ThreadPoolExecutor(3) as starts:
            started = {name: starts.submit(start, kip, natural, directory) for name, natural in those.items() if name in chosen}
        noise = kip.run("noise", ["python3", "-c", NOISE], flags=["--idle", "1h"])
        # Each has all of the time, however long a busy machine takes to start the last.
        wait(started.values())
        run = Run(time.monotonic() + seconds, noise, long)
        with ThreadPoolExecutor(len(those)) as pool:
            done: dict[str, Future[None]] = {
                # Apart, for all together they would wait for each other.
                name: pool.submit(drive, those[name], future.result(), run, PAUSE * place / len(those))
                for place, (name, future) in enumerate(started.items())
                if future.exception() is None
            }
        events = kip.events()
        parked = [event["name"] for event in events if event["kind"] == "parked"]
        slept = parked + [event["name"] for event in events if event["kind"] == "hibernated"]

        def judge(name: str) -> None:
            assert MODULES.exists() or not name.startswith("node"), "scripts/setup could not install Node's modules"
            if failure := started[name].exception():
                raise failure
            try:
                done[name].result()
            except AssertionError as failure:
                failure.add_note("\n".join(f"{event['at_ms']} {event['kind']} {event['detail']}" for event in events if event["name"] == name))
                raise
            assert slept.count(name) >= those[name].sleeps, f"{name} slept {slept.count(name)} times\n{kip.account()}"
            assert parked.count(name) >= those[name].parks, f"{name} was parked {parked.count(name)} times\n{kip.account()}"

        yield judge


@pytest.fixture(scope="module")
def short(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], None]]:
    yield from all_run(request, tmp_path_factory.mktemp("natural"), SHORT, (SLEEPS + 2) * PAUSE, 45)


# promise P7: nothing is noticed with all defaults, no `kip sleep`: gunicorn (sync with a 5 s
#   supervisor, gthread), uvicorn, Node (pages, SSE and WebSocket pings, a long timer beside an
#   interval), long polls and slow handlers of Node, gunicorn and uvicorn, HAProxy, Jetty, RabbitMQ,
#   redis (BLPOP, EX), a session of vsftpd (Debian's settings, PAM), APScheduler, schedule,
#   node-cron, cron: no request lost or late, no worker killed, each job on its time, over six
#   sleeps each, or fewer that last longer, of what is answered without a wake; celery beat, which
#   is never idle, stays awake
# held by: this, for a quarter of an hour `tests/test_natural.py::test_nothing_is_noticed_for_long`
@pytest.mark.measures
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", SHORT)
def test_nothing_is_noticed(short: Callable[[str], None], name: str) -> None:
    short(name)


@pytest.fixture(scope="module")
def long(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], None]]:
    yield from all_run(request, tmp_path_factory.mktemp("natural"), LONG, 1000, 300)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", LONG)
def test_nothing_is_noticed_for_long(long: Callable[[str], None], name: str) -> None:
    long(name)
