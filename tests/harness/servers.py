"""Set-ups of real servers: what is in the tarball, the command, the ports. Each runs unmodified, in the foreground.

Used both by the tests and, to check a set-up by itself, without Kip."""

from __future__ import annotations

import grp
import hashlib
import pwd
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from harness import programs

# What every web server serves: a small page, and a file that does not fit any socket buffer.
PAGE = b"hello from " + b"kip " * 50 + b"\n"
BIG = random.Random(1).randbytes(700_001)
BIG_SHA = hashlib.sha256(BIG).hexdigest()
WWW = {"srv/www/page.html": PAGE, "srv/www/big.bin": BIG}


@dataclass(frozen=True)
class Server:
    """A server's set-up."""

    name: str
    command: list[str]
    port: int
    files: Mapping[str, bytes | str | Path] = field(default_factory=dict)
    ports: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    modes: Mapping[str, int] = field(default_factory=dict)
    owners: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    # Has state in memory under /kv/ and /count.
    has_kv: bool = False

    def tarball(self, directory: Path) -> Path:
        return programs.tarball(directory / f"{self.name}.tar", self.files, self.modes, self.owners)

    @property
    def published(self) -> tuple[str, ...]:
        return self.ports or (str(self.port),)


LIGHTTPD_CONF = """
server.port = 8080
server.document-root = "/srv/www"
server.errorlog = "/dev/stderr"
server.max-keep-alive-requests = 10000
server.max-keep-alive-idle = 3600
$SERVER["socket"] == "[::]:8080" { }
"""


def lighttpd() -> Server:
    files = {**WWW, "etc/lighttpd/kip.conf": LIGHTTPD_CONF}
    return Server("lighttpd", ["lighttpd", "-D", "-f", "/etc/lighttpd/kip.conf"], 8080, files)


# Workers drop to www-data; logs go where containers have them.
NGINX_CONF = """
daemon off;
user www-data;
worker_processes 2;
pid /run/nginx.pid;
error_log /dev/stderr warn;
events { worker_connections 512; }
http {
    access_log /dev/stdout;
    client_body_temp_path /tmp/nginx-body;
    proxy_temp_path /tmp/nginx-proxy;
    fastcgi_temp_path /tmp/nginx-fastcgi;
    uwsgi_temp_path /tmp/nginx-uwsgi;
    scgi_temp_path /tmp/nginx-scgi;
    keepalive_requests 10000;
    keepalive_timeout 3600s;
    server {
        listen 8080 backlog=77;
        listen [::]:8080 backlog=77;
        root /srv/www;
        location = /worker { return 200 "$pid\\n"; }
    }
}
"""


def nginx() -> Server:
    # Debian's package brings this directory; nginx opens its compiled-in error log before it reads
    # its settings.
    files = {**WWW, "etc/nginx/kip.conf": NGINX_CONF, "var/log/nginx/": "", "var/lib/nginx/": ""}
    return Server("nginx", ["nginx", "-c", "/etc/nginx/kip.conf"], 8080, files)


def python() -> Server:
    command = ["/usr/bin/python3", "-m", "http.server", "8080", "--directory", "/srv/www", "--protocol", "HTTP/1.1"]
    return Server("python", command, 8080, WWW)


def node() -> Server:
    files = {**WWW, "srv/web.js": programs.SOURCES / "web.js"}
    return Server("node", ["node", "/srv/web.js", "8080", "/srv/www"], 8080, files, has_kv=True)


def go() -> Server:
    files = {**WWW, "usr/local/bin/goweb": programs.go_program("goweb")}
    return Server("go", ["/usr/local/bin/goweb", ":8080", "/srv/www"], 8080, files, has_kv=True)


WEB = {"lighttpd": lighttpd, "nginx": nginx, "python": python, "node": node, "go": go}


def redis() -> Server:
    command = ["redis-server", "--port", "6379", "--bind", "*", "-::*", "--protected-mode", "no", "--save", "", "--dir"]
    return Server("redis", [*command, "/tmp", "--enable-debug-command", "yes"], 6379)


ZONE_NAMES = {f"host{i}.kip.test": f"192.0.2.{i}" for i in range(1, 101)}


def bind() -> Server:
    conf = """
options {
    directory "/var/cache/bind";
    listen-on port 53 { any; };
    listen-on-v6 port 53 { any; };
    recursion no;
    allow-query { any; };
    pid-file "/run/named/named.pid";
    session-keyfile "/run/named/session.key";
    dnssec-validation no;
    minimal-responses yes;
    tcp-idle-timeout 1200;
};
controls { };
zone "kip.test" { type primary; file "/etc/bind/db.kip.test"; };
"""
    zone = "$TTL 3600\n@ IN SOA ns.kip.test. admin.kip.test. 1 3600 600 86400 3600\n"
    zone += "@ IN NS ns.kip.test.\nns IN A 192.0.2.1\n"
    zone += "".join(f"{name.split('.')[0]} IN A {address}\n" for name, address in ZONE_NAMES.items())
    zone += "long IN TXT " + " ".join(f'"{c * 200}"' for c in "abcdefghij") + "\n"
    files = {"etc/bind/named.conf": conf, "etc/bind/db.kip.test": zone, "var/cache/bind/": "", "run/named/": ""}
    return Server("bind", ["named", "-f", "-c", "/etc/bind/named.conf"], 53, files, ports=("53", "53/udp"))


def postfix(watchdog: str = "10s") -> Server:
    """Its own passwd and group: the numbers in a tarball are those of the machine it was made on. Its logger wakes up three times in each
    `watchdog`."""
    main = f"""
postlogd_watchdog_timeout = {watchdog}
compatibility_level = 3.6
myhostname = mail.kip.test
mydestination = mail.kip.test, kip.test, localhost
mynetworks = 127.0.0.0/8
inet_interfaces = all
inet_protocols = all
alias_maps =
alias_database =
local_recipient_maps =
smtpd_recipient_restrictions = reject_unauth_destination
mail_spool_directory = /var/mail
biff = no
maillog_file = /var/log/mail/postfix.log
maillog_file_prefixes = /var
smtpd_tls_security_level = none
mailbox_size_limit = 0
message_size_limit = 10240000
data_directory = /var/lib/postfix
queue_directory = /var/spool/postfix
"""
    master = """
smtp      inet  n  -  n  -     -  smtpd
pickup    unix  n  -  n  60    1  pickup
cleanup   unix  n  -  n  -     0  cleanup
qmgr      unix  n  -  n  300   1  qmgr
tlsmgr    unix  -  -  n  1000? 1  tlsmgr
rewrite   unix  -  -  n  -     -  trivial-rewrite
bounce    unix  -  -  n  -     0  bounce
defer     unix  -  -  n  -     0  bounce
trace     unix  -  -  n  -     0  bounce
verify    unix  -  -  n  -     1  verify
flush     unix  n  -  n  1000? 0  flush
proxymap  unix  -  -  n  -     -  proxymap
smtp      unix  -  -  n  -     -  smtp
showq     unix  n  -  n  -     -  showq
error     unix  -  -  n  -     -  error
retry     unix  -  -  n  -     -  error
discard   unix  -  -  n  -     -  discard
local     unix  -  n  n  -     -  local
virtual   unix  -  n  n  -     -  virtual
anvil     unix  -  -  n  -     1  anvil
scache    unix  -  -  n  -     1  scache
postlog   unix-dgram n -  n  -     1  postlogd
"""
    user, drop = pwd.getpwnam("postfix"), grp.getgrnam("postdrop").gr_gid
    passwd = f"""root:x:0:0:root:/root:/bin/sh
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin
postfix:x:{user.pw_uid}:{user.pw_gid}::/var/spool/postfix:/usr/sbin/nologin
alice:x:1000:1000::/home/alice:/bin/sh
"""
    group = f"root:x:0:\nmail:x:8:\nnogroup:x:65534:\npostfix:x:{user.pw_gid}:\npostdrop:x:{drop}:\nalice:x:1000:\n"
    etc = Path("/etc/postfix")
    shipped = ["postfix-files", "postfix-script", "post-install"]
    files: dict[str, bytes | str | Path] = {
        "etc/postfix/main.cf": main,
        "etc/postfix/master.cf": master,
        "etc/postfix/dynamicmaps.cf": "",
        "etc/passwd": passwd,
        "etc/group": group,
        "var/spool/postfix/": "",
        "var/lib/postfix/": "",
        "var/log/mail/": "",
        **{f"etc/postfix/{name}": etc / name for name in shipped},
    }
    own = {"var/lib/postfix/": (user.pw_uid, user.pw_gid)}
    return Server("postfix", ["postfix", "start-fg"], 25, files, flags=("--allow-setuid",), owners=own)


def mariadb() -> Server:
    """Small, and with asynchronous I/O left at its default: the sandbox makes it fall back."""
    conf = """
[mariadbd]
datadir = /var/lib/mysql
socket = /tmp/mysql.sock
pid-file = /tmp/mysql.pid
port = 3306
bind-address = *
user = root
skip-name-resolve
innodb_buffer_pool_size = 16M
innodb_log_file_size = 4M
innodb_undo_tablespaces = 0
key_buffer_size = 1M
performance_schema = off
max_connections = 20
wait_timeout = 28800
init-file = /etc/mysql/init.sql
"""
    init = """
CREATE USER IF NOT EXISTS kip@'%' IDENTIFIED BY 'kip';
GRANT ALL ON *.* TO kip@'%';
CREATE DATABASE IF NOT EXISTS test;
"""
    start = """#!/bin/sh
set -e
test -d /var/lib/mysql/mysql || mariadb-install-db --defaults-file=/etc/mysql/my.cnf --skip-test-db \
    --auth-root-authentication-method=normal >/tmp/install.log 2>&1 || { cat /tmp/install.log >&2; exit 1; }
exec mariadbd --defaults-file=/etc/mysql/my.cnf
"""
    files = {"etc/mysql/my.cnf": conf, "etc/mysql/init.sql": init, "srv/start": start, "var/lib/mysql/": ""}
    return Server("mariadb", ["/srv/start"], 3306, files, modes={"srv/start": 0o755})


# What torture has that only CRIU restores: with this in its environment the wakes of torture are
# native.
ONLY_CRIU = "TORTURE_SKIP=proc"


def torture(static: bool = False) -> Server:
    program = programs.c_program("torture", *(["-static"] if static else []))
    name = "torture-static" if static else "torture"
    return Server(name, ["/srv/torture", "7000"], 7000, {"srv/torture": program}, ports=("7000", "7000/udp"))


def hostile() -> Server:
    """Fights the pager; programs/hostile.c."""
    return Server("hostile", ["/srv/hostile", "7100"], 7100, {"srv/hostile": programs.c_program("hostile")}, ports=("7100",))


def memory(criu: bool = False) -> Server:
    """Obeys orders on its memory; programs/memory.c. Or with something that only CRIU restores."""
    command = ["/srv/memory", "7200", *(["criu"] if criu else [])]
    return Server("memory", command, 7200, {"srv/memory": programs.c_program("memory", "-static")}, ports=("7200",))


def scarce(*what: str) -> Server:
    """Has used up a limit; programs/scarce.c."""
    program = programs.c_program("scarce", "-static")
    return Server("scarce", ["/srv/scarce", "7400", *what], 7400, {"srv/scarce": program}, ports=("7400",))


def churn(threads: int) -> Server:
    """Threads that come and go; programs/churn.c."""
    program = programs.c_program("churn", "-static")
    return Server("churn", ["/srv/churn", "7500", str(threads)], 7500, {"srv/churn": program}, ports=("7500",))


def reader(pages: int) -> Server:
    """Has noise in memory and reads of it what it is told to; programs/reader.c."""
    program = programs.c_program("reader", "-static", "-pthread")
    return Server("reader", ["/srv/reader", "7300", str(pages)], 7300, {"srv/reader": program}, ports=("7300",))


def echo(*ports: int) -> Server:
    inside = ports or (9000,)
    published = tuple(f"{p}{proto}" for p in inside for proto in ("", "/udp"))
    command = ["/usr/bin/python3", "/srv/echo.py", *map(str, inside)]
    return Server("echo", command, inside[0], {"srv/echo.py": programs.SOURCES / "echo.py"}, ports=published)


def places() -> Server:
    """One of everything that has a place in the file system; programs/places.py."""
    files = {"srv/places.py": programs.SOURCES / "places.py"}
    return Server("places", ["/usr/bin/python3", "/srv/places.py", "7300"], 7300, files)


def alarm() -> Server:
    """Answers lines, and rings."""
    return Server("alarm", ["/usr/bin/python3", "/srv/alarm.py", "7000"], 7000, {"srv/alarm.py": programs.SOURCES / "alarm.py"})
