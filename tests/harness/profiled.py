"""A program of each profile, with a client that uses it and its own periodic work made visible within a few seconds.

Most have a time-out of two seconds for a client that says nothing: a connection made after a sleep is closed by it, no sooner
and hardly later."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from harness import servers
from harness.kip import Proc
from harness.servers import Server

QUIET_S = 2
# Some look at their clients once a second or two, and a loaded machine is slow.
LATE_S = 4


def open_to(proc: Proc, port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proc.port(port)), timeout=20)


def said(proc: Proc, port: int, words: bytes, wanted: bytes) -> None:
    """Says something, or nothing where the server speaks first, and is answered."""
    with open_to(proc, port) as client:
        if words:
            client.sendall(words)
        answer = b""
        while wanted not in answer:
            more = client.recv(65536)
            assert more, f"the server closed after {answer!r}"
            answer += more


def closed_when_quiet(proc: Proc, port: int, words: bytes = b"", seconds: float = QUIET_S) -> None:
    """A client that says no more is sent away by the server's own timer."""
    with open_to(proc, port) as client:
        if words:
            client.sendall(words)
        begun = time.monotonic()
        with suppress(ConnectionResetError):
            while client.recv(65536):
                assert time.monotonic() - begun < 60, "the server goes on talking"
        took = time.monotonic() - begun
    assert seconds - 1 <= took <= seconds + LATE_S, f"closed after {took:.1f} s"


@dataclass(frozen=True)
class Case:
    """A server whose processes are all of the profile, how it is used, and what shows that its timers go on."""

    profile: str
    server: Callable[[], Server]
    use: Callable[[Proc], None]
    beats: Callable[[Proc], None]


def speaks(profile: str, server: Callable[[], Server], port: int, words: bytes, wanted: bytes, quiet: bytes | None = None) -> Case:
    """A server that answers `words` with something that has `wanted` in it, and sends away a client that then says nothing."""
    return Case(
        profile,
        server,
        lambda proc: said(proc, port, words, wanted),
        lambda proc: closed_when_quiet(proc, port, words if quiet is None else quiet),
    )


HTTP = b"GET /page.html HTTP/1.1\r\nHost: kip\r\n\r\n"


def changed(server: Server, path: str, old: str, new: str) -> Server:
    text = server.files[path]
    assert isinstance(text, str) and old in text
    files = {**server.files, path: text.replace(old, new)}
    return Server(server.name, server.command, server.port, files, server.ports, server.flags, server.modes, server.owners)


def lighttpd() -> Server:
    return changed(servers.lighttpd(), "etc/lighttpd/kip.conf", "keep-alive-idle = 3600", "keep-alive-idle = 2")


def nginx() -> Server:
    return changed(servers.nginx(), "etc/nginx/kip.conf", "keepalive_timeout 3600s", "keepalive_timeout 2s")


def redis() -> Server:
    server = servers.redis()
    return Server("redis", [*server.command, "--timeout", "2"], 6379)


def memcached() -> Server:
    return Server("memcached", ["memcached", "-u", "root", "-l", "0.0.0.0", "-p", "11211", "-m", "8", "-U", "0"], 11211)


def memcached_expires(proc: Proc) -> None:
    with open_to(proc, 11211) as client:
        lines = client.makefile("rb")
        client.sendall(b"set beat 0 2 1\r\nx\r\nget beat\r\n")
        assert [lines.readline() for _ in range(4)] == [b"STORED\r\n", b"VALUE beat 0 1\r\n", b"x\r\n", b"END\r\n"]
        begun = time.monotonic()
        while True:
            client.sendall(b"get beat\r\n")
            if lines.readline() == b"END\r\n":
                break
            lines.readline(), lines.readline()
            assert time.monotonic() - begun < 2 + LATE_S, "it does not expire"
            time.sleep(0.1)
        assert time.monotonic() - begun > 0.5


def mariadb() -> Server:
    return changed(servers.mariadb(), "etc/mysql/my.cnf", "wait_timeout = 28800", "connect_timeout = 2")


POSTGRES_START = """#!/bin/sh
set -e
PATH=$PATH:$(echo /usr/lib/postgresql/*/bin)
as="setpriv --reuid 65534 --regid 65534 --clear-groups"
if [ ! -d /tmp/db ]; then
    mkdir /tmp/db && chown 65534 /tmp/db && chmod 700 /tmp/db
    $as initdb -D /tmp/db -A trust -U kip --no-sync >/dev/null
    echo host all all all trust >>/tmp/db/pg_hba.conf
fi
exec $as postgres -D /tmp/db -c listen_addresses='*' -c unix_socket_directories=/tmp -c shared_buffers=8MB \\
    -c dynamic_shared_memory_type=mmap -c authentication_timeout=2s -c fsync=off
"""


def postgres() -> Server:
    return Server("postgres", ["/srv/start"], 5432, {"srv/start": POSTGRES_START}, modes={"srv/start": 0o755})


SSL_REQUEST = struct.pack("!II", 8, 80877103)


def mosquitto() -> Server:
    conf = "listener 1883\nallow_anonymous true\nuser root\n"
    return Server("mosquitto", ["mosquitto", "-c", "/etc/kip-mosquitto.conf"], 1883, {"etc/kip-mosquitto.conf": conf})


# Protocol 3.1.1, a clean session, keep-alive of 1 s: the broker waits half as long again.
MQTT = bytes([0x10, 16, 0, 4]) + b"MQTT" + bytes([4, 2, 0, 1, 0, 4]) + b"beat"


def named() -> Server:
    return changed(servers.bind(), "etc/bind/named.conf", "tcp-idle-timeout 1200", "tcp-idle-timeout 20; tcp-initial-timeout 25")


def query(name: str) -> bytes:
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return struct.pack("!6H", 7, 0x0100, 1, 0, 0, 0) + labels + struct.pack("!BHH", 0, 1, 1)


def dns_use(name: str, address: str) -> Callable[[Proc], None]:
    def use(proc: Proc) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.settimeout(20)
            client.connect(("127.0.0.1", proc.port(53, "udp")))
            client.send(query(name))
            assert socket.inet_aton(address) in client.recv(4096)

    return use


def dns_over_tcp(name: str) -> bytes:
    return struct.pack("!H", len(query(name))) + query(name)


def postfix() -> Server:
    return changed(servers.postfix(), "etc/postfix/main.cf", "biff = no", "biff = no\nsmtpd_timeout = 2s")


def ngircd() -> Server:
    conf = """[Global]
Name = irc.kip.test
Info = kip
Listen = 0.0.0.0
Ports = 6667
ServerUID = root
ServerGID = root
[Limits]
PingTimeout = 2
PongTimeout = 2
[Options]
DNS = no
Ident = no
PAM = no
"""
    return Server("ngircd", ["ngircd", "-n", "-f", "/etc/kip-ngircd.conf"], 6667, {"etc/kip-ngircd.conf": conf})


def ngircd_pings(proc: Proc) -> None:
    """Asked after 2 s, and sent away 2 s later."""
    closed_when_quiet(proc, 6667, seconds=4)


def dnsmasq() -> Server:
    command = ["dnsmasq", "-k", "-C", "/dev/null", "-u", "root", "-R", "-h", "--host-record=host7.kip.test,192.0.2.7", "-x", ""]
    return Server("dnsmasq", command, 53, ports=("53", "53/udp"))


def apache2() -> Server:
    modules = "mpm_event authz_core authz_host dir mime".split()
    conf = "".join(f"LoadModule {m}_module /usr/lib/apache2/modules/mod_{m}.so\n" for m in modules)
    conf += """ServerName kip
ServerRoot /tmp
PidFile /tmp/apache2.pid
Listen 8080
User www-data
Group www-data
ErrorLog /dev/stderr
TypesConfig /dev/null
DocumentRoot /srv/www
KeepAlive On
KeepAliveTimeout 2
StartServers 1
"""
    return Server("apache2", ["apache2", "-DFOREGROUND", "-f", "/etc/kip-apache2.conf"], 8080, {**servers.WWW, "etc/kip-apache2.conf": conf})


def haproxy() -> Server:
    conf = """global
    maxconn 100
defaults
    mode http
    timeout client 2s
    timeout connect 2s
    timeout server 2s
    timeout http-keep-alive 2s
frontend web
    bind :8080
    http-request return status 200 content-type text/plain string "hello from kip"
"""
    return Server("haproxy", ["haproxy", "-db", "-f", "/etc/kip-haproxy.cfg"], 8080, {"etc/kip-haproxy.cfg": conf})


def unbound() -> Server:
    conf = """server:
    interface: 0.0.0.0
    access-control: 0.0.0.0/0 allow
    chroot: ""
    username: ""
    pidfile: ""
    directory: "/tmp"
    use-syslog: no
    do-daemonize: no
    num-threads: 1
    tcp-idle-timeout: 2000
    local-zone: "kip.test." static
    local-data: "host7.kip.test. IN A 192.0.2.7"
remote-control:
    control-enable: no
"""
    return Server("unbound", ["unbound", "-d", "-c", "/etc/kip-unbound.conf"], 53, {"etc/kip-unbound.conf": conf}, ports=("53", "53/udp"))


def nsd() -> Server:
    conf = """server:
    ip-address: 0.0.0.0
    username: ""
    chroot: ""
    zonesdir: "/tmp"
    database: ""
    xfrdfile: "/tmp/xfrd.state"
    pidfile: ""
    server-count: 1
    tcp-timeout: 2
remote-control:
    control-enable: no
zone:
    name: kip.test
    zonefile: /etc/kip.zone
"""
    zone = "$ORIGIN kip.test.\n$TTL 3600\n@ SOA ns admin 1 3600 600 86400 3600\n@ NS ns\nns A 192.0.2.1\nhost7 A 192.0.2.7\n"
    files = {"etc/kip-nsd.conf": conf, "etc/kip.zone": zone}
    return Server("nsd", ["nsd", "-d", "-c", "/etc/kip-nsd.conf"], 53, files, ports=("53", "53/udp"))


def tinyproxy() -> Server:
    conf = 'Port 8888\nTimeout 2\nMaxClients 10\nStatHost "kip.stats"\nLogLevel Warning\n'
    return Server("tinyproxy", ["tinyproxy", "-d", "-c", "/etc/kip-tinyproxy.conf"], 8888, {"etc/kip-tinyproxy.conf": conf})


def beanstalkd() -> Server:
    return Server("beanstalkd", ["beanstalkd", "-l", "0.0.0.0", "-p", "11300"], 11300)


def beanstalkd_delays(proc: Proc) -> None:
    with open_to(proc, 11300) as client:
        lines = client.makefile("rb")
        begun = time.monotonic()
        client.sendall(b"put 0 2 60 4\r\nbeat\r\nreserve-with-timeout 20\r\n")
        assert lines.readline().startswith(b"INSERTED")
        job = lines.readline().split()
        took = time.monotonic() - begun
        assert job[0] == b"RESERVED" and lines.readline() == b"beat\r\n"
        client.sendall(b"delete " + job[1] + b"\r\n")
        assert lines.readline() == b"DELETED\r\n"
    assert 1.9 <= took <= 2 + LATE_S, took


def sshd() -> Server:
    conf = """Port 22
HostKey /etc/ssh/kip_key
PidFile none
UsePAM no
LoginGraceTime 2
StrictModes no
"""
    start = "#!/bin/sh\nset -e\nmkdir -p /run/sshd\n[ -e /etc/ssh/kip_key ] || ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/kip_key\nexec /usr/sbin/sshd -D -e -f /etc/ssh/kip.conf\n"
    passwd = "root:x:0:0:root:/root:/bin/sh\nsshd:x:65534:65534::/run/sshd:/usr/sbin/nologin\n"
    files = {"etc/ssh/kip.conf": conf, "srv/start": start, "etc/passwd": passwd, "etc/ssh/": ""}
    return Server("sshd", ["/srv/start"], 22, files, modes={"srv/start": 0o755})


def vsftpd() -> Server:
    conf = """listen=YES
background=NO
anonymous_enable=YES
local_enable=NO
seccomp_sandbox=NO
isolate=NO
isolate_network=NO
one_process_model=YES
run_as_launching_user=YES
anon_root=/srv/www
secure_chroot_dir=/srv/www
idle_session_timeout=2
"""
    return Server("vsftpd", ["vsftpd", "/etc/kip-vsftpd.conf"], 21, {**servers.WWW, "etc/kip-vsftpd.conf": conf})


def privoxy() -> Server:
    conf = "listen-address 0.0.0.0:8118\nsocket-timeout 2\nkeep-alive-timeout 2\nconfdir /etc/privoxy\nlogdir /tmp\n"
    files = {"etc/kip-privoxy.conf": conf, **{f"etc/privoxy/templates/{p.name}": p for p in Path("/etc/privoxy/templates").glob("*")}}
    return Server("privoxy", ["privoxy", "--no-daemon", "/etc/kip-privoxy.conf"], 8118, files)


def rsync() -> Server:
    conf = "[files]\npath = /srv/www\nuse chroot = no\nuid = root\ngid = root\n"
    command = ["rsync", "--daemon", "--no-detach", "--port", "873", "--config", "/etc/kip-rsyncd.conf", "--log-file", "/dev/stderr"]
    return Server("rsync", command, 873, {**servers.WWW, "etc/kip-rsyncd.conf": conf})


def registry() -> Server:
    conf = """version: 0.1
storage:
  filesystem:
    rootdirectory: /tmp/registry
http:
  addr: :5000
"""
    return Server("registry", ["docker-registry", "serve", "/etc/kip-registry.yml"], 5000, {"etc/kip-registry.yml": conf})


def twice(use: Callable[[Proc], None]) -> Callable[[Proc], None]:
    """Of one without periodic work that a client could see: it serves on for longer than its timers take."""

    def beats(proc: Proc) -> None:
        for _ in range(3):
            time.sleep(1)
            use(proc)

    return beats


def web(proc: Proc) -> None:
    said(proc, 8080, HTTP, b"hello from kip")


def listed(proc: Proc) -> None:
    said(proc, 873, b"@RSYNCD: 31.0\n\n", b"files")


def versions(proc: Proc) -> None:
    said(proc, 5000, b"GET /v2/ HTTP/1.1\r\nHost: kip\r\n\r\n", b"200 OK")


STATS = b"GET http://kip.stats/ HTTP/1.1\r\nHost: kip.stats\r\n\r\n"
LOGIN = b"NICK beat\r\nUSER beat 0 * :beat\r\n"
HOST = ("host7.kip.test", "192.0.2.7")


def dns(profile: str, server: Callable[[], Server]) -> Case:
    return Case(profile, server, dns_use(*HOST), lambda proc: closed_when_quiet(proc, 53, dns_over_tcp(HOST[0])))


CASES = [
    speaks("lighttpd", lighttpd, 8080, HTTP, b"hello from kip"),
    speaks("nginx", nginx, 8080, HTTP, b"hello from kip"),
    speaks("redis", redis, 6379, b"PING\r\n", b"+PONG"),
    Case("python http.server", servers.python, web, twice(web)),
    Case("memcached", memcached, lambda proc: said(proc, 11211, b"version\r\n", b"VERSION"), memcached_expires),
    speaks("mariadb", mariadb, 3306, b"", b"MariaDB"),
    speaks("postgres", postgres, 5432, SSL_REQUEST, b"N"),
    speaks("mosquitto", mosquitto, 1883, MQTT, bytes([0x20, 2, 0, 0])),
    dns("named", named),
    speaks("postfix", postfix, 25, b"", b"220 mail.kip.test"),
    Case("ngircd", ngircd, lambda proc: said(proc, 6667, LOGIN, b" 001 beat "), ngircd_pings),
    Case("dnsmasq", dnsmasq, dns_use(*HOST), twice(dns_use(*HOST))),
    speaks("apache2", apache2, 8080, HTTP, b"hello from kip"),
    speaks("haproxy", haproxy, 8080, HTTP, b"hello from kip"),
    dns("unbound", unbound),
    dns("nsd", nsd),
    speaks("tinyproxy", tinyproxy, 8888, STATS, b"200", quiet=b""),
    Case("beanstalkd", beanstalkd, lambda proc: said(proc, 11300, b"stats\r\n", b"OK"), beanstalkd_delays),
    speaks("sshd", sshd, 22, b"", b"SSH-2.0-"),
    speaks("vsftpd", vsftpd, 21, b"", b"220 "),
    speaks("privoxy", privoxy, 8118, b"GET http://p.p/ HTTP/1.1\r\nHost: p.p\r\n\r\n", b"200 OK", quiet=b""),
    Case("rsync", rsync, listed, twice(listed)),
    Case("docker-registry", registry, versions, twice(versions)),
]
