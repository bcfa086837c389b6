"""Images of the services of three applications, from this machine's own programs: what their usual images hold, and no more."""

from __future__ import annotations

import glob
import subprocess
from functools import cache
from pathlib import Path

from harness.images import Image, archive, entry, link, with_libraries

PYTHON = Path("/usr/bin/python3").resolve()
# Of the standard library, what no server needs.
LEFT_OUT = {"config-", "dist-packages", "test", "distutils", "idlelib", "tkinter", "ensurepip", "lib2to3", "pydoc_data"}
POSTGRES = sorted(glob.glob("/usr/lib/postgresql/*/bin"))[-1] if glob.glob("/usr/lib/postgresql/*/bin") else ""

MARIADB_START = """#!/bin/sh
set -e
cat >/tmp/first.sql <<END
CREATE USER IF NOT EXISTS '$MARIADB_USER'@'%' IDENTIFIED BY '$MARIADB_PASSWORD';
CREATE DATABASE IF NOT EXISTS $MARIADB_DATABASE;
GRANT ALL ON $MARIADB_DATABASE.* TO '$MARIADB_USER'@'%';
END
test -d /var/lib/mysql/mysql || mariadb-install-db --no-defaults --datadir=/var/lib/mysql --skip-test-db \\
    --auth-root-authentication-method=normal --innodb-log-file-size=4M >&2
exec mariadbd --no-defaults --datadir=/var/lib/mysql --socket=/tmp/mysql.sock --user=root --bind-address=0.0.0.0 \\
    --skip-name-resolve --innodb-buffer-pool-size=16M --innodb-log-file-size=4M --performance-schema=off --init-file=/tmp/first.sql "$@"
"""

POSTGRES_START = """#!/bin/sh
set -e
if [ ! -e "$PGDATA/PG_VERSION" ]; then
    initdb -D "$PGDATA" -U "$POSTGRES_USER" -A trust >/dev/null
    echo 'host all all all trust' >>"$PGDATA/pg_hba.conf"
fi
exec postgres -D "$PGDATA" -c listen_addresses='*' -c unix_socket_directories=/tmp
"""

# A web server whose answer is `page(path)`.
WEB = """
import os, socket, subprocess
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def redis(*words):
    with socket.create_connection((os.environ["REDIS_HOST"], 6379)) as s:
        s.sendall(b"*%d\\r\\n" % len(words) + b"".join(b"$%d\\r\\n%s\\r\\n" % (len(w), w.encode()) for w in words))
        return s.recv(1000).decode().strip()


def serve(page):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            body = page(self.path).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

    ThreadingHTTPServer(("", 80), Handler).serve_forever()
"""

COUNTER = "from web import *\nserve(lambda path: 'seen ' + redis('INCR', 'hits').lstrip(':') + ' times')\n"

BLOG = """
from web import *


def sql(text):
    host, _, port = os.environ["WORDPRESS_DB_HOST"].partition(":")
    words = ["mariadb", "-h", host, "-P", port, "-u", os.environ["WORDPRESS_DB_USER"], "-p" + os.environ["WORDPRESS_DB_PASSWORD"]]
    done = subprocess.run([*words, "-N", "-B", os.environ["WORDPRESS_DB_NAME"], "-e", text], capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else done.stderr


def page(path):
    post = path.partition("?post=")[2]
    if post:
        return sql("create table if not exists posts (n int auto_increment primary key, text varchar(99));"
                   f"insert into posts (text) values ('{post}'); select 'posted'")
    return sql("select text from posts order by n")


serve(page)
"""

VOTE = "from web import *\nserve(lambda path: redis('RPUSH', 'votes', path.strip('/')))\n"

PSQL = """
from web import *


def sql(text):
    words = ["psql", "-h", os.environ.get("DB_HOST", "db"), "-U", "postgres", "-Atq", "-c", text]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout
"""

WORKER = """
from tally import *

sql("create table if not exists votes (vote text)")
votes = socket.create_connection((os.environ["REDIS_HOST"], 6379)).makefile("rwb")
while True:
    votes.write(b"*3\\r\\n$5\\r\\nBLPOP\\r\\n$5\\r\\nvotes\\r\\n$1\\r\\n0\\r\\n")
    votes.flush()
    vote = [votes.readline() for _ in range(5)][4].decode().strip()
    sql(f"insert into votes values ('{vote}')")
"""

RESULT = "from tally import *\nserve(lambda path: sql('select vote, count(*) from votes group by vote order by vote'))\n"


def tree(path: Path, skip: set[str] = frozenset()) -> list:  # type: ignore[assignment]
    """A directory of this machine, at its place."""
    entries = [entry(str(path).lstrip("/"))]
    for found in sorted(path.rglob("*")):
        below = found.relative_to(path)
        if any(below.parts[0].startswith(word) for word in skip):
            continue
        inside = str(found).lstrip("/")
        if found.is_symlink():
            entries.append(link(inside, str(found.readlink())))
        else:
            entries.append(entry(inside, None if found.is_dir() else found.read_bytes()))
    return entries


@cache
def base() -> bytes:
    """A shell with all that busybox has."""
    program = "/usr/bin/busybox" if Path("/usr/bin/busybox").exists() else "/bin/busybox"
    names = subprocess.run([program, "--list"], capture_output=True, text=True, check=True).stdout.split()
    people = "root:x:0:0::/root:/bin/sh\npostgres:x:999:999::/var/lib/postgresql:/bin/sh\n"
    entries = [entry("usr"), entry("usr/bin"), link("bin", "usr/bin"), entry("tmp", mode=0o1777), entry("etc"), entry("root")]
    entries += [entry("etc/passwd", people, mode=0o644), entry("etc/group", "root:x:0:\npostgres:x:999:\n", mode=0o644)]
    entries += [entry("usr/bin/busybox", Path(program).read_bytes())]
    entries += [link(f"usr/bin/{name}", "busybox") for name in names if name != "busybox"]
    return archive(entries)


@cache
def python() -> bytes:
    return archive(tree(Path(f"/usr/lib/{PYTHON.name}"), LEFT_OUT))


def application(program: str, *needs: str, **more: str) -> Image:
    """A Python application as its image: the program, and what it imports."""
    files = {"web.py": WEB, "app.py": program, **{f"{name}.py": text for name, text in more.items()}}
    entries = [entry("app")] + [entry(f"app/{name}", text, mode=0o644) for name, text in files.items()]
    path = "/usr/bin:/bin" + (f":{POSTGRES}" if POSTGRES else "")
    config = {
        "Entrypoint": ["python3", "-u", "/app/app.py"], "WorkingDir": "/app", "ExposedPorts": {"80/tcp": {}},
        "Env": [f"PATH={path}", "LANG=C.UTF-8", "REDIS_HOST=redis"],
    }  # fmt: skip
    return Image([base(), with_libraries("/usr/bin/python3", *needs), python(), archive(entries)], config, packing="plain")


def redis() -> Image:
    """With a shell, which health checks need."""
    config = {"Entrypoint": ["redis-server"], "Cmd": ["--save", "", "--protected-mode", "no"], "ExposedPorts": {"6379/tcp": {}}}
    return Image([base(), with_libraries("/usr/bin/redis-server"), archive([entry("data")])], config, packing="plain")


def mariadb() -> Image:
    programs = ["/usr/sbin/mariadbd", "/usr/bin/mariadb", "/usr/bin/mariadb-admin", "/usr/bin/my_print_defaults", "/usr/bin/resolveip"]
    entries = tree(Path("/usr/share/mysql")) + tree(Path("/usr/share/mariadb") if Path("/usr/share/mariadb").is_dir() else Path("/usr/share/mysql/charsets"))
    entries += [entry("usr/bin/mariadb-install-db", Path("/usr/bin/mariadb-install-db").read_bytes())]
    entries += [entry("usr/bin/docker-entrypoint.sh", MARIADB_START), entry("var"), entry("var/lib"), entry("var/lib/mysql")]
    config = {
        "Entrypoint": ["docker-entrypoint.sh"], "Env": ["PATH=/usr/bin:/bin:/usr/sbin", "LANG=C"],
        "ExposedPorts": {"3306/tcp": {}}, "Volumes": {"/var/lib/mysql": {}},
    }  # fmt: skip
    return Image([base(), with_libraries(*programs), archive(entries)], config, packing="plain")


def postgres() -> Image:
    programs = [f"{POSTGRES}/{name}" for name in ("postgres", "initdb", "pg_isready", "psql")]
    root = Path(POSTGRES).parent
    entries = tree(root / "lib", {"bitcode", "pgxs", "llvmjit"}) + tree(Path("/usr/share/postgresql") / root.name, {"man", "extension"})
    entries += [entry("usr/bin/docker-entrypoint.sh", POSTGRES_START), entry("var"), entry("var/lib")]
    data = "var/lib/postgresql/data"
    entries += [entry("var/lib/postgresql", uid=999, gid=999), entry(data, uid=999, gid=999, mode=0o700)]
    # The one extension without which no database is made.
    entries += tree(Path(f"/usr/share/postgresql/{root.name}/extension"), {"a", "b", "c", "d", "e", "f", "h", "i", "j", "l", "m", "o", "pg", "pa", "r", "s", "t", "u", "x"})
    config = {
        "Entrypoint": ["docker-entrypoint.sh"], "User": "postgres", "StopSignal": "SIGINT",
        "Env": [f"PATH={POSTGRES}:/usr/bin:/bin", "LANG=C", f"PGDATA=/{data}", "POSTGRES_USER=postgres"],
        "ExposedPorts": {"5432/tcp": {}}, "Volumes": {f"/{data}": {}},
    }  # fmt: skip
    return Image([base(), with_libraries(*programs), archive(entries)], config, packing="plain")
