"""The Compose files of three well-known applications, in their usual shape: they come up, find each other by name, sleep and wake."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import apps, images
from harness.clients import http_get
from harness.kip import Kip, Proc
from harness.wait import wait_for

COUNTER = """\
name: counter
services:
  web:
    build: .
    image: counter
    ports:
      - "80"
    environment:
      - REDIS_HOST=redis
    depends_on:
      - redis
  redis:
    image: redis:7
    restart: always
    volumes:
      - redis-data:/data
volumes:
  redis-data:
"""

BLOG = """\
name: blog
services:
  db:
    image: mariadb:10
    command: --character-set-server=utf8mb4
    volumes:
      - db_data:/var/lib/mysql
    restart: always
    environment:
      MARIADB_ROOT_PASSWORD: somewordpress
      MARIADB_DATABASE: wordpress
      MARIADB_USER: wordpress
      MARIADB_PASSWORD: ${DB_PASSWORD:-wordpress}
    healthcheck:
      test: mariadb-admin -S /tmp/mysql.sock ping
      interval: 1s
      retries: 60
    expose:
      - 3306
  wordpress:
    image: wordpress:6
    depends_on:
      db:
        condition: service_healthy
    ports:
      - "80"
    restart: always
    environment:
      WORDPRESS_DB_HOST: db:3306
      WORDPRESS_DB_USER: wordpress
      WORDPRESS_DB_PASSWORD: ${DB_PASSWORD:-wordpress}
      WORDPRESS_DB_NAME: wordpress
volumes:
  db_data: {}
"""

VOTING = """\
name: voting
services:
  vote:
    image: voting/vote
    depends_on:
      redis: {condition: service_healthy}
    ports: ["80"]
    networks: [front-tier, back-tier]
  result:
    image: voting/result
    depends_on:
      db: {condition: service_healthy}
      worker: {condition: service_started}
    ports: ["80"]
    networks: [front-tier, back-tier]
  worker:
    image: voting/worker
    depends_on:
      redis: {condition: service_healthy}
      db: {condition: service_healthy}
    networks: [back-tier]
  redis:
    image: redis:7
    healthcheck:
      test: ["CMD", "redis-server", "--version"]
      interval: "1s"
    networks: [back-tier]
  db:
    image: postgres:15
    environment:
      POSTGRES_USER: "postgres"
      POSTGRES_PASSWORD: "postgres"
    volumes:
      - "db-data:/var/lib/postgresql/data"
    healthcheck:
      test: ["CMD", "pg_isready", "-h", "/tmp"]
      interval: "1s"
      retries: 60
    networks: [back-tier]
volumes:
  db-data:
networks:
  front-tier:
  back-tier:
"""


def bring_up(kip: Kip, directory: Path, text: str, **built: images.Image) -> list[str]:
    """Loads the images, applies the file; what was said of keys that Kip lacks."""
    for number, (name, image) in enumerate(built.items()):
        layout = images.layout(directory / f"image-{number}", latest=image)
        kip.cli("image", "load", f"oci:{layout}:latest", "--name", name, timeout=120)
    file = directory / "compose.yaml"
    file.write_text(text)
    done = kip.cli("apply", "-f", file, timeout=180)
    assert kip.cli("diff", "-f", file).stdout == ""
    return [line for line in done.stderr.splitlines() if "is not supported" in line]


def reply(port: int, path: str = "/") -> bytes:
    """Nothing, as long as the server is not up."""
    try:
        return http_get(port, path)
    except OSError:
        return b""


def asleep(kip: Kip, *names: str) -> None:
    """All of them; every second one on the disk."""
    for number, name in enumerate(names):
        proc = Proc(kip, name)
        proc.sleep() if number % 2 == 0 else proc.hibernate()


def taken_away(kip: Kip) -> None:
    kip.remove_all()
    names = [volume["name"] for volume in kip.json("volume", "ls")]
    kip.cli("volume", "rm", *names)
    kip.cli("image", "gc", "--all")


# promise files: services, and procs with the same `--network`, find each other by name and aliases,
#   awake and asleep; a proc that comes or goes is known to those that run
# held by: this, `kip_engine::host::names::tests::only_what_is_between_the_marks_changes`,
#   `kip_describe::compose::tests::services_are_procs`
# promise files: private ports: other procs dial them, the host has no port for them
# held by: this, `tests/test_compose_apps.py::test_the_voting_application`
# promise files: the Compose files of three well-known applications in their usual shape come up,
#   sleep and wake: a counter with redis, a blog with MariaDB, a poll of five services with
#   PostgreSQL
# held by: this, `tests/test_compose_apps.py::test_wordpress_and_mariadb`,
#   `tests/test_compose_apps.py::test_the_voting_application`
def test_a_counter_and_redis(kip: Kip, tmp_path: Path) -> None:
    told = bring_up(kip, tmp_path, COUNTER, **{"counter:latest": apps.application(apps.COUNTER), "redis:7": apps.redis()})
    assert len(told) == 1 and "services.web.build" in told[0], told
    web = Proc(kip, "counter-web")
    wait_for("it answers", lambda: reply(web.port(80)), 20)
    before = int(http_get(web.port(80)).split()[1])
    for count in range(1, 4):
        asleep(kip, *(("counter-web", "counter-redis") if count % 2 else ("counter-redis", "counter-web")))
        assert http_get(web.port(80)) == b"seen %d times" % (before + count), "the one wakes the other by its name"
    assert kip.json("inspect", "counter-redis")["ports"][0]["host_port"] is None, "nobody published it"
    hosts = web.exec("cat", "/etc/hosts").stdout
    # The running procs know a proc that comes by its name, and no longer once it goes.
    kip.cli("run", "--name", "late", "--network", kip.json("inspect", "counter-web")["spec"]["network"], "--alias", "later", "--", "sleep", "1000")
    assert any(line.split()[1:] == ["late", "later"] for line in web.exec("cat", "/etc/hosts").stdout.splitlines())
    kip.cli("rm", "--force", "late")
    assert web.exec("cat", "/etc/hosts").stdout == hosts
    taken_away(kip)


def test_wordpress_and_mariadb(kip: Kip, tmp_path: Path) -> None:
    wordpress = apps.application(apps.BLOG, "/usr/bin/mariadb")
    told = bring_up(kip, tmp_path, BLOG, **{"mariadb:10": apps.mariadb(), "wordpress:6": wordpress})
    assert len(told) == 1 and "services.db.healthcheck" in told[0], told
    port = Proc(kip, "blog-wordpress").port(80)
    wait_for("it answers", lambda: reply(port, "/?post=first") == b"posted\n", 20)
    for count in range(2):
        asleep(kip, *(("blog-db", "blog-wordpress") if count % 2 else ("blog-wordpress", "blog-db")))
        assert http_get(port) == b"first\n"
    assert http_get(port, "/?post=second") == b"posted\n"
    asleep(kip, "blog-db")
    assert http_get(port) == b"first\nsecond\n"
    taken_away(kip)


# promise files: an empty named volume gets owner and mode of the directory that it covers
def test_the_voting_application(kip: Kip, tmp_path: Path) -> None:
    if not apps.POSTGRES:
        pytest.fail("postgresql is not installed: run scripts/setup")
    psql = f"{apps.POSTGRES}/psql"
    built = {
        "redis:7": apps.redis(),
        "postgres:15": apps.postgres(),
        "voting/vote:latest": apps.application(apps.VOTE),
        "voting/worker:latest": apps.application(apps.WORKER, psql, tally=apps.PSQL),
        "voting/result:latest": apps.application(apps.RESULT, psql, tally=apps.PSQL),
    }
    told = bring_up(kip, tmp_path, VOTING, **built)
    assert all("healthcheck" in line or "networks" in line for line in told), told
    vote, result = Proc(kip, "voting-vote"), Proc(kip, "voting-result")
    wait_for("votes are taken", lambda: reply(vote.port(80), "/cats").startswith(b":"), 20)
    wait_for("it was counted", lambda: reply(result.port(80)) == b"cats|1\n", 20)
    asleep(kip, *(f"voting-{name}" for name in ("vote", "redis", "worker", "db", "result")))
    assert http_get(vote.port(80), "/dogs").startswith(b":")
    # The worker has waited in its sleep for redis, and wakes the database.
    wait_for("it was counted", lambda: reply(result.port(80)) == b"cats|1\ndogs|1\n", 20)
    taken_away(kip)
