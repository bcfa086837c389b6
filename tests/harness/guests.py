"""Real programs of Debian, of the Python index and of npm, each with a client whose connection stays open over the sleeps.

`open` connects, leaves something in the program's memory or on its disk, and gives the check: it asks on the same connection
and sees that what was left is there. Nothing reconnects. `harness/compatibility.py` puts them through the tiers."""

from __future__ import annotations

import base64
import hashlib
import http.client
import imaplib
import itertools
import json
import shutil
import socket
import ssl
import subprocess
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from harness import apps, profiled, programs, servers, sleepers
from harness.clients import TIMEOUT, DnsTcp, Http
from harness.databases import MariaDb, Postgres
from harness.kip import ROOT, Proc
from harness.packages import MODULES, PYPI, distribution, interpreter, node_files, python_files
from harness.servers import Server
from harness.sleepers import Check
from harness.wait import wait_for

SOURCES = programs.SOURCES / "guests"
WSGI, ASGI = SOURCES / "wsgi.py", SOURCES / "asgi.py"
DEBIAN, PYTHON_INDEX, NPM = "Debian", "PyPI", "npm"
# Of the server's time-outs for clients that are silent: none is to come within a run.
HOUR = "3600"
TIERS = ("hibernated", "parked", "archived")


@dataclass(frozen=True)
class Guest:
    """A program and its client."""

    name: str
    source: str
    package: str
    server: Callable[[], Server]
    open: Callable[[Proc], Check]
    # What a user notices, beyond what the run itself sees.
    notices: str = ""
    # Not a server: its owner wakes it.
    by_owner: bool = False
    # Tiers in which it does not stay.
    awake: tuple[str, ...] = ()

    def missing(self) -> str | None:
        """Why it cannot be run here."""
        where = {PYTHON_INDEX: PYPI, NPM: MODULES}.get(self.source)
        return f"scripts/setup could not install {self.package}" if where and not where.is_dir() else None

    def sleeps(self) -> list[str]:
        return [tier for tier in TIERS if tier not in self.awake]

    def version(self) -> str:
        if self.source == PYTHON_INDEX:
            return distribution(self.package).version
        if self.source == NPM:
            return json.loads((MODULES / self.package / "package.json").read_text())["version"]
        done = subprocess.run(["dpkg-query", "-W", "-f", "${Version}", self.package], capture_output=True, text=True)
        return done.stdout if done.returncode == 0 and done.stdout else "not from a package"


# Clients.


class Talk:
    """A connection over which words go there and answers come back."""

    def __init__(self, port: int, context: ssl.SSLContext | None = None):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT)
        if context:
            self.socket = context.wrap_socket(self.socket)

    def ask(self, words: bytes, wanted: bytes) -> None:
        if words:
            self.socket.sendall(words)
        answer = b""
        while wanted not in answer:
            more = self.socket.recv(65536)
            assert more, f"the server closed after {answer!r}, without {wanted!r}"
            answer += more


Words = tuple[bytes, bytes]


def talk(port: int, before: Iterable[Words], again: Words) -> Callable[[Proc], Check]:
    """What is said at first, and what is asked after each wake, each with what is in the answer."""

    def open_it(proc: Proc) -> Check:
        client = Talk(proc.port(port))
        for words, wanted in before:
            client.ask(words, wanted)
        return lambda: client.ask(*again)

    return open_it


def half(port: int, first: Words, rest: Words) -> Callable[[Proc], Check]:
    """Of a server that closes after each answer: over each sleep there is a connection with half a request."""

    def begun(proc: Proc) -> Talk:
        client = Talk(proc.port(port))
        client.ask(*first)
        return client

    def open_it(proc: Proc) -> Check:
        waiting = [begun(proc)]

        def check() -> None:
            client = waiting.pop()
            client.ask(*rest)
            client.socket.close()
            waiting.append(begun(proc))

        return check

    return open_it


def half_page(port: int, path: bytes, wanted: bytes) -> Callable[[Proc], Check]:
    return half(port, (b"GET " + path + b" HTTP/1.1\r\nHost: kip\r\n", b""), (b"\r\n", wanted))


def page(path: str, body: bytes) -> Callable[[Proc], Check]:
    def open_it(proc: Proc) -> Check:
        steady = Http(proc.port())

        def check() -> None:
            answer = steady.get(path)
            assert body in answer, answer

        check()
        return check

    return open_it


def counted(proc: Proc) -> Check:
    """A page that says how often it was asked for: the number is in the program's memory."""
    steady = Http(proc.port())
    right = itertools.count(1)

    def check() -> None:
        answer, wanted = steady.get("/"), next(right)
        assert int(answer) == wanted, (answer, wanted)

    check()
    return check


def dns(proc: Proc) -> Check:
    client = DnsTcp(proc.port(53))

    def check() -> None:
        assert client.ask("host7.kip.test") == [socket.inet_aton("192.0.2.7")]

    check()
    return check


def upgrade(path: bytes) -> bytes:
    """The request for a WebSocket."""
    key = base64.b64encode(b"0123456789abcdef")
    fields = [b"Host: kip", b"Upgrade: websocket", b"Connection: Upgrade", b"Sec-WebSocket-Version: 13", b"Sec-WebSocket-Key: " + key]
    return b"\r\n".join([b"GET " + path + b" HTTP/1.1", *fields, b"", b""])


def websocket(proc: Proc) -> Check:
    """RFC 6455: a frame of text with a mask of zeros; the server says it again, with how many it has had."""
    client = Talk(proc.port())
    client.ask(upgrade(b"/"), b"\r\n\r\n")
    right = itertools.count(1)

    def check() -> None:
        client.ask(b"\x81\x84\0\0\0\0said", b"said %d" % next(right))

    check()
    return check


def socket_io(proc: Proc) -> Check:
    """Engine.IO 4 over a WebSocket: an event there, and one back with how many there were."""

    def frame(words: bytes) -> bytes:
        return bytes([0x81, 0x80 | len(words)]) + bytes(4) + words

    client = Talk(proc.port())
    client.ask(upgrade(b"/socket.io/?EIO=4&transport=websocket"), b'"sid"')
    client.ask(frame(b"40"), b'40{"sid"')
    right = itertools.count(1)

    def check() -> None:
        client.ask(frame(b'42["say","here"]'), b'42["said","here",%d]' % next(right))

    check()
    return check


# Programs in a language.


def python_guest(name: str, open_it: Callable[[Proc], Check], *words: str, also: tuple[str, ...] = ()) -> Guest:
    """`words`: arguments of Python; without, the program is the one of that name in `programs/guests`."""

    def server() -> Server:
        files = {**servers.WWW, **python_files(name, *also), **{f"srv/{path.name}": path for path in (WSGI, ASGI)}}
        if not words:
            files["srv/main.py"] = SOURCES / f"{name.lower()}.py"
        command = ["/usr/bin/env", "PYTHONPATH=/srv/pypi:/srv", interpreter(), *(words or ("/srv/main.py",))]
        return Server(name.lower(), command, 8000, files)

    return Guest(name.lower(), PYTHON_INDEX, name, server, open_it)


def node_guest(name: str, open_it: Callable[[Proc], Check], *words: str) -> Guest:
    """`words`: arguments of Node; without, the program is the one of that name in `programs/guests`."""

    def server() -> Server:
        files = {**servers.WWW, **node_files(name)}
        if not words:
            files["srv/main.js"] = SOURCES / f"{name}.js"
        return Server(name, ["node", *(words or ("/srv/main.js",))], 8000, files)

    return Guest(name, NPM, name, server, open_it)


# Programs of Debian.


def changed(make: Callable[[], Server], old: str, new: str) -> Callable[[], Server]:
    """Another setting, in the one file or in the command that has it."""

    def server() -> Server:
        before = make()
        files = {path: text.replace(old, new) if isinstance(text, str) else text for path, text in before.files.items()}
        command = [word.replace(old, new) for word in before.command]
        assert (dict(before.files), before.command) != (files, command), old
        return replace(before, files=files, command=command)

    return server


def mqtt(kind: int, body: bytes) -> bytes:
    return bytes([kind, len(body)]) + body


def text(words: bytes) -> bytes:
    return len(words).to_bytes(2, "big") + words


def broker(port: int) -> Callable[[Proc], Check]:
    """MQTT 3.1.1 without keep-alive: a subscription, over which what is published comes back."""
    connect = mqtt(0x10, text(b"MQTT") + bytes([4, 2, 0, 0]) + text(b"guest"))
    subscribe = mqtt(0x82, b"\0\1" + text(b"left") + b"\0")
    message = mqtt(0x30, text(b"left") + b"here")
    return talk(port, [(connect, b"\x20\2\0\0"), (subscribe, b"\x90\3\0\1\0")], (message, message))


def mariadb(proc: Proc) -> Check:
    session = MariaDb(proc.port())
    session.ask("CREATE TEMPORARY TABLE test.left_here (x INT)")
    session.ask("INSERT INTO test.left_here VALUES (7)")

    def check() -> None:
        assert session.ask("SELECT x FROM test.left_here") == [["7"]]

    return check


def postgres(proc: Proc) -> Check:
    session = Postgres(proc.port())
    session.ask("CREATE TEMPORARY TABLE left_here AS SELECT 7 AS x")

    def check() -> None:
        assert session.ask("SELECT x FROM left_here") == [["7"]]

    return check


def dovecot() -> Server:
    """The reader's half of the recipe `mail`."""
    recipe = ROOT / "recipes" / "mail" / "config"
    start = "#!/bin/sh\nset -e\nmkdir -p /var/vmail\nchown mail:mail /var/vmail\nexec dovecot -F -c /srv/mail/dovecot.conf\n"
    files = {"srv/start": start, "srv/mail/dovecot.conf": recipe / "dovecot.conf", "srv/mail/users": "alice:secret\n", "var/lib/dovecot-state/": ""}
    return Server("dovecot", ["/srv/start"], 143, files, flags=("--allow-setuid",), modes={"srv/start": 0o755})


def imap(proc: Proc) -> Check:
    session = imaplib.IMAP4("127.0.0.1", proc.port(143), timeout=60)
    session.login("alice", "secret")
    kind, _ = session.append("INBOX", None, None, b"Subject: left\r\n\r\nhere\r\n")
    assert kind == "OK" and session.select()[0] == "OK"

    def check() -> None:
        answer = session.fetch("1", "(BODY[TEXT])")[1][0]
        assert isinstance(answer, tuple) and answer[1].strip() == b"here", answer

    return check


SSH_KEYS = programs.directory


def sshd() -> Server:
    """As in `profiled.py`, and a key that lets root in."""
    key = SSH_KEYS() / "guest-key"
    if not key.exists():
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    before = changed(profiled.sshd, "LoginGraceTime 2", "LoginGraceTime 60\nPermitRootLogin yes\nAuthorizedKeysFile /srv/key.pub")()
    files = {**before.files, "srv/key.pub": Path(f"{key}.pub").read_text(), "root/": ""}
    return replace(before, files=files, flags=(*before.flags, "--allow-setuid"))


def shell_over_ssh(proc: Proc) -> Check:
    options = ["StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR", "BatchMode=yes"]
    words = ["ssh", "-F", "none", "-i", SSH_KEYS() / "guest-key", "-p", str(proc.port(22)), *(f"-o{option}" for option in options), "root@127.0.0.1", "sh"]
    session = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert session.stdin and session.stdout
    session.stdin.write(b"left=here\n")

    def check() -> None:
        assert session.stdin and session.stdout
        session.stdin.write(b"echo $left\n")
        session.stdin.flush()
        assert (answer := session.stdout.readline()) == b"here\n", answer

    check()
    return check


def registry(proc: Proc) -> Check:
    steady = Http(proc.port())
    steady.request("POST", "/v2/left/blobs/uploads/")
    begun = steady.getresponse()
    begun.read()
    digest = "sha256:" + hashlib.sha256(b"here").hexdigest()
    where = (begun.getheader("Location") or "").partition("/v2/")[2]
    steady.request("PUT", f"/v2/{where}&digest={digest}", b"here")
    done = steady.getresponse()
    done.read()
    assert done.status == 201, done.status

    def check() -> None:
        assert steady.get(f"/v2/left/blobs/{digest}") == b"here"

    return check


AMQP_CLIENT = """
import sys
import pika
connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", int(sys.argv[1]), heartbeat=0))
channel = connection.channel()
channel.queue_declare("left", exclusive=True)
channel.basic_publish("", "left", b"here")
for line in sys.stdin:
    method, _, body = channel.basic_get("left")
    channel.basic_nack(method.delivery_tag)
    print(body.decode(), flush=True)
"""


def amqp(proc: Proc) -> Check:
    """A message in a queue of this connection."""
    words = ["/usr/bin/python3", "-c", AMQP_CLIENT, str(proc.port(5672))]
    client = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert client.stdin and client.stdout

    def check() -> None:
        assert client.stdin and client.stdout
        client.stdin.write("get\n")
        client.stdin.flush()
        assert (answer := client.stdout.readline()) == "here\n", answer

    check()
    return check


def jetty() -> Server:
    settings = {f"etc/jetty9/{path.name}": path for path in sorted(Path("/etc/jetty9").glob("*.xml"))}
    files = {**settings, "srv/base/webapps/ROOT/page.html": servers.PAGE, "var/log/jetty9/": ""}
    words = "java -Xmx64m -jar /usr/share/jetty9/start.jar jetty.home=/usr/share/jetty9 jetty.base=/srv/base --module=deploy,http jetty.http.idleTimeout=3600000"
    return Server("jetty", words.split(), 8080, files)


def git() -> Server:
    start = "#!/bin/sh\nset -e\nexport HOME=/tmp\n[ -d /srv/left ] || { git init -q -b main /srv/left\n" \
        "git -C /srv/left -c user.name=kip -c user.email=kip@kip.test commit -q --allow-empty -m here; }\n" \
        "exec git daemon --reuseaddr --export-all --base-path=/srv\n"  # fmt: skip
    return Server("git", ["/srv/start"], 9418, {"srv/start": start}, modes={"srv/start": 0o755})


GIT_ASKS = b"git-upload-pack /left\0host=kip\0"
GIT_ASKS = b"%04x" % (len(GIT_ASKS) + 4) + GIT_ASKS


def reversing() -> Server:
    start = "#!/bin/sh\nset -e\n[ -e /srv/key ] || openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=kip -keyout /srv/key -out /srv/cert 2>/dev/null\n" \
        "exec openssl s_server -accept 4433 -key /srv/key -cert /srv/cert -quiet -rev\n"  # fmt: skip
    return Server("openssl", ["/srv/start"], 4433, {"srv/start": start}, modes={"srv/start": 0o755})


def tls(proc: Proc) -> Check:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    client = Talk(proc.port(), context)
    client.ask(b"ereh\n", b"here\n")
    return lambda: client.ask(b"ereh tfel\n", b"left here\n")


JOBS = {"srv/jobs.py": programs.SOURCES / "natural" / "jobs.py"}


def job(kind: str) -> Guest:
    """It says each second of its own that it ran; nothing connects."""

    def runs(proc: Proc) -> Check:
        def times() -> list[str]:
            return [line for line in proc.logs().splitlines() if line.startswith("ran ")]

        def check() -> None:
            before = times()
            proc.wake()
            wait_for("its job runs", lambda: len(times()) > len(before), 30)
            assert times()[: len(before)] == before, "it goes on where it was"

        wait_for("its job runs", times, 30)
        return check

    server = Server(kind, ["/usr/bin/python3", "/srv/jobs.py", kind, "2"], 0, JOBS)
    return Guest(kind, DEBIAN, f"python3-{kind}", lambda: server, runs, "a job every two seconds, on its time", by_owner=True)


def celery() -> Server:
    words = "redis-server --save '' --protected-mode no >/dev/null & cd /srv && exec python3 -m celery -A tasks worker -c 1"
    return Server("celery", ["sh", "-c", words], 6379, {"srv/tasks.py": programs.SOURCES / "natural" / "tasks.py", "srv/ran": ""})


def task(proc: Proc) -> Check:
    """A task put into the queue on a connection that stays."""
    client, ran = sleepers.Redis(proc.port()), [""]

    def check() -> None:
        number = str(uuid.uuid4())
        message = {
            "body": base64.b64encode(b"[[], {}, {}]").decode(), "content-type": "application/json", "content-encoding": "utf-8",
            "headers": {"lang": "py", "task": "tasks.job", "id": number, "root_id": number},
            "properties": {"correlation_id": number, "delivery_tag": number, "delivery_mode": 2, "body_encoding": "base64",
                           "delivery_info": {"exchange": "", "routing_key": "celery"}, "priority": 0},
        }  # fmt: skip
        client.ask("LPUSH", "celery", json.dumps(message))
        before = ran[0]
        ran[0] = wait_for("the task has run", lambda: (now := proc.exec("cat", "/srv/ran").stdout) != before and now, 60)
        assert ran[0].startswith(before)

    check()
    return check


def chromedriver(proc: Proc) -> Check:
    steady = http.client.HTTPConnection("127.0.0.1", proc.port(), timeout=TIMEOUT)

    def check() -> None:
        steady.request("GET", "/status", headers={"Host": "127.0.0.1:9515"})
        answer = steady.getresponse()
        body = answer.read()
        assert answer.status == 200 and b'"ready":true' in body, body

    check()
    steady.auto_open = 0
    return check


def web(name: str, package: str, server: Callable[[], Server], notices: str = "") -> Guest:
    return Guest(name, DEBIAN, package, server, page("/page.html", servers.PAGE), notices)


def debian(name: str, package: str, server: Callable[[], Server], open_it: Callable[[Proc], Check], notices: str = "") -> Guest:
    return Guest(name, DEBIAN, package, server, open_it, notices)


FTP_SAYS = [(b"", b"220 "), (b"USER anonymous\r\n", b"331 "), (b"PASS x\r\n", b"230 "), (b"TYPE I\r\n", b"200 ")]
SMTP_SAYS = [(b"", b"220 "), (b"EHLO kip.test\r\n", b"250 "), (b"MAIL FROM:<a@kip.test>\r\n", b"250 ")]
FTP_SIZE = (b"SIZE page.html\r\n", b"213 %d\r\n" % len(servers.PAGE))
SMTP_RECIPIENT = (b"RCPT TO:<b@kip.test>\r\n", b"250 ")
POSTGRES = "postgresql-" + (Path(apps.POSTGRES).parent.name or "15")
BUSYBOX = shutil.which("busybox") or "/usr/bin/busybox"
FROM_DEBIAN = [
    web("lighttpd", "lighttpd", servers.lighttpd),
    web("nginx", "nginx", servers.nginx),
    web("apache2", "apache2-bin", changed(profiled.apache2, "KeepAliveTimeout 2", f"KeepAliveTimeout {HOUR}")),
    debian("haproxy", "haproxy", changed(profiled.haproxy, " 2s", " 1h"), page("/", b"hello from kip")),
    web("python http.server", "python3", servers.python),
    debian("node", "nodejs", servers.node, lambda proc: sleepers.web("node", servers.node).leave(proc)),
    debian("busybox httpd", "busybox-static", lambda: Server("busybox", [BUSYBOX, "httpd", "-f", "-p", "8080", "-h", "/srv/www"], 8080, servers.WWW), half_page(8080, b"/page.html", servers.PAGE)),
    debian("jetty", "jetty9", jetty, page("/page.html", servers.PAGE)),
    debian("gunicorn", "gunicorn", lambda: Server("gunicorn", ["gunicorn", "-b", "0.0.0.0:8000", "-k", "gthread", "--threads", "4", "--keep-alive", HOUR, "--chdir", "/srv", "wsgi:app"], 8000, {"srv/wsgi.py": WSGI}), counted),
    debian("uvicorn", "python3-uvicorn", lambda: Server("uvicorn", ["python3", "-m", "uvicorn", "--app-dir", "/srv", "--host", "0.0.0.0", "--timeout-keep-alive", HOUR, "asgi:app"], 8000, {"srv/asgi.py": ASGI}), counted),
    debian("redis", "redis-server", servers.redis, sleepers.redis_leave),
    debian("memcached", "memcached", profiled.memcached, talk(11211, [(b"set left 0 0 4\r\nhere\r\n", b"STORED\r\n")], (b"get left\r\n", b"VALUE left 0 4\r\nhere\r\nEND\r\n"))),
    debian("mariadb", "mariadb-server", servers.mariadb, mariadb),
    debian("postgres", POSTGRES, changed(profiled.postgres, "authentication_timeout=2s", "authentication_timeout=1min"), postgres),
    debian("mosquitto", "mosquitto", profiled.mosquitto, broker(1883)),
    debian("rabbitmq", "rabbitmq-server", lambda: Server("rabbitmq", ["rabbitmq-server"], 5672, {"etc/rabbitmq/rabbitmq.conf": "loopback_users = none\n"}), amqp),
    debian("beanstalkd", "beanstalkd", profiled.beanstalkd, talk(11300, [(b"put 0 0 60 4\r\nhere\r\n", b"INSERTED 1\r\n")], (b"peek 1\r\n", b"FOUND 1 4\r\nhere\r\n"))),
    debian("celery", "python3-celery", celery, task, "worker and broker talk to each other all the time"),
    debian("named", "bind9", servers.bind, dns),
    debian("unbound", "unbound", changed(profiled.unbound, "tcp-idle-timeout: 2000", "tcp-idle-timeout: 3600000"), dns),
    debian("nsd", "nsd", changed(profiled.nsd, "tcp-timeout: 2", f"tcp-timeout: {HOUR}"), dns),
    debian("dnsmasq", "dnsmasq-base", profiled.dnsmasq, dns),
    debian("postfix", "postfix", servers.postfix, sleepers.postfix_leave),
    debian("dovecot", "dovecot-imapd", dovecot, imap),
    debian("ngircd", "ngircd", changed(profiled.ngircd, "Timeout = 2", f"Timeout = {HOUR}"), talk(6667, [(b"NICK beat\r\nUSER beat 0 * :beat\r\nJOIN #kip\r\nTOPIC #kip :left here\r\n", b"TOPIC #kip :left here")], (b"TOPIC #kip\r\n", b" 332 beat #kip :left here"))),
    debian("sshd", "openssh-server", sshd, shell_over_ssh),
    debian("vsftpd", "vsftpd", changed(profiled.vsftpd, "idle_session_timeout=2", f"idle_session_timeout={HOUR}"), talk(21, FTP_SAYS, FTP_SIZE)),
    debian("tinyproxy", "tinyproxy", changed(profiled.tinyproxy, "Timeout 2", f"Timeout {HOUR}"), half(8888, (profiled.STATS[:-2], b""), (b"\r\n", b"200"))),
    debian("privoxy", "privoxy", changed(profiled.privoxy, "timeout 2", "timeout 300"), half_page(8118, b"http://p.p/", b"200 OK")),
    debian("rsync", "rsync", profiled.rsync, half(873, (b"@RSYNCD: 31.0\n", b"@RSYNCD: "), (b"\n", b"files"))),
    debian("git daemon", "git", git, half(9418, (GIT_ASKS[:20], b""), (GIT_ASKS[20:], b"refs/heads/main"))),
    debian("docker-registry", "docker-registry", profiled.registry, registry),
    debian("openssl s_server", "openssl", reversing, tls),
    debian("bash behind socat", "socat", lambda: Server("socat", ["socat", "TCP-LISTEN:7000,reuseaddr,fork", "EXEC:/bin/bash"], 7000), talk(7000, [(b"left=here; echo $((6*7))\n", b"42\n")], (b"echo $left\n", b"here\n"))),
    debian("chromedriver", "chromium-driver", lambda: Server("chromedriver", ["chromedriver", "--port=9515", "--allowed-ips="], 9515), chromedriver),
    job("apscheduler"),
    job("schedule"),
]  # fmt: skip

# Programs of the Python index.

RADICALE = ["--config", "", "--server-hosts", "0.0.0.0:8000", "--auth-type", "none", "--storage-filesystem-folder", "/tmp/collections"]
FROM_PYPI = [
    python_guest("waitress", counted),
    python_guest("Flask", counted, also=("waitress",)),
    python_guest("tornado", counted),
    python_guest("aiohttp", counted),
    python_guest("cheroot", counted),
    python_guest("hypercorn", counted, "-m", "hypercorn", "-b", "0.0.0.0:8000", "--keep-alive", HOUR, "asgi:app"),
    python_guest("websockets", websocket),
    python_guest("aiosmtpd", talk(8000, SMTP_SAYS, SMTP_RECIPIENT), "-m", "aiosmtpd", "-n", "-l", "0.0.0.0:8000"),
    python_guest("pyftpdlib", talk(8000, FTP_SAYS, FTP_SIZE)),
    python_guest("pypiserver", half_page(8000, b"/simple/", b"200 OK"), "-m", "pypiserver", "run", "-p", "8000", "-i", "0.0.0.0", "/srv/www"),
    python_guest("Radicale", half_page(8000, b"/.web/", b"200 OK"), "-m", "radicale", *RADICALE, "--server-timeout", HOUR),
]

# Programs of npm.

FROM_NPM = [
    node_guest("express", counted),
    node_guest("koa", counted),
    node_guest("fastify", counted),
    node_guest("http-server", page("/page.html", servers.PAGE), "/srv/node_modules/http-server/bin/http-server", "/srv/www", "-p", "8000", "-t", HOUR, "-c-1"),
    node_guest("ws", websocket),
    node_guest("socket.io", socket_io),
    node_guest("smtp-server", talk(8000, SMTP_SAYS, SMTP_RECIPIENT)),
    node_guest("aedes", broker(8000)),
]

ALL = {guest.name: guest for guest in [*FROM_DEBIAN, *FROM_PYPI, *FROM_NPM]}
# Those of `make test`: some of each source, which start fast.
SHORT = ["lighttpd", "nginx", "busybox httpd", "redis", "memcached", "mosquitto", "beanstalkd", "unbound", "bash behind socat", "waitress", "websockets", "express", "ws"]
