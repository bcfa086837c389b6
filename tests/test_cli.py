"""The command line: bad input and trouble get one clear line and exit code 1, JSON has its shapes, logs and exec work."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import archives, leftovers, programs, servers
from harness.clients import Lines, http_get
from harness.kip import COLOURS, Kip, Proc, one_line_refusal
from harness.typist import Typist
from harness.wait import wait_for

# Completion and manual


# promise commands: `kip completion SHELL` completes commands, flags and names of procs; `kip man`
#   makes a page for each command
# held by: this, `tests/test_cli.py::test_manual_pages`,
#   `kip_cli::manual::tests::every_command_has_a_page`
def test_a_shell_completes_commands_and_names(kip: Kip, tmp_path: Path) -> None:
    """A real bash, with what `kip completion bash` prints."""
    proc = kip.run("complete-me", ["sleep", "1000"])
    proc.sleep()
    (tmp_path / "kip").symlink_to(kip.program)

    def completed(*words: str) -> list[str]:
        script = f"""source <(kip completion bash)
            COMP_WORDS=(kip {" ".join(words)} ""); COMP_CWORD={len(words) + 1}; COMP_TYPE=9
            _clap_complete_kip kip "" ""; printf '%s\\n' "${{COMPREPLY[@]}}" """
        env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=30, check=True)
        return [word.strip() for word in done.stdout.splitlines()]

    assert {"run", "sleep", "wake", "image"} <= set(completed())
    assert "complete-me" in completed("--data", str(kip.data), "wake")
    assert completed("--data", str(kip.data), "image") != [] and "ls" in completed("image")
    assert "complete-me" not in completed("--data", str(tmp_path), "wake"), "no daemon: no names, and no word of it"
    assert "tcsh" in kip.refused("completion", "tcsh") and proc.state == "parked"


def test_manual_pages(kip: Kip, tmp_path: Path) -> None:
    assert kip.cli("man").stdout.count(".SH SYNOPSIS") == 1
    kip.cli("man", "--dir", tmp_path / "man")
    assert {"kip.1", "kip-run.1", "kip-image-pull.1"} <= {page.name for page in (tmp_path / "man").iterdir()}
    (tmp_path / "file").write_text("")
    assert "cannot make" in kip.refused("man", "--dir", tmp_path / "file/man")


# Bad input


# promise command-line: exit codes 0, 1, 2
# held by: this, `crates/cli/tests/command.rs::failures_are_one_line_and_code_1`
# promise trouble: wrong usage: exit code 2
def test_usage_errors_exit_2(kip: Kip) -> None:
    for words in (
        ["dance"],
        ["run"],
        ["run", "--port", "x", "--", "true"],
        ["sleep"],
        ["run", "--mem", "much", "--", "true"],
        [],
    ):
        done = kip.cli(*words, check=False)
        assert done.returncode == 2, (words, done.returncode, done.stderr)
        assert "usage" in done.stderr.lower() or "--help" in done.stderr, done.stderr


# promise trouble: missing command, one that may not be executed
def test_missing_command(kip: Kip) -> None:
    for command in ("/no/such/program", "no-such-program-in-the-path", "/etc/passwd", "/usr"):
        line = kip.refused("run", "--name", "nothing", "--", command)
        assert command in line, line
        assert kip.names() == []


# promise trouble: a script or program whose interpreter is not in the proc's files is refused with
#   the names of both, at a start and by exec
# held by: this, `kip_files::interpreter::tests::scripts_and_programs_name_what_runs_them`
def test_missing_interpreter(kip: Kip, tmp_path: Path) -> None:
    (tmp_path / "some-script").write_text("#!/opt/python/bin/python3 -u\nprint(1)\n")
    (tmp_path / "some-program").write_bytes(Path("/usr/bin/true").read_bytes().replace(b"/lib64/ld-linux-x86-64.so.2", b"/lib64/ld-linux-x86-64.so.9"))
    for file in tmp_path.iterdir():
        file.chmod(0o755)
    volume = ["-v", f"{tmp_path}:/srv/bin:ro"]
    proc = kip.run("there", ["sleep", "1000"], flags=volume)
    for name, words in (
        ("some-script", ["the script /srv/bin/some-script begins with #!/opt/python/bin/python3", "put that there"]),
        ("some-program", ["the program /srv/bin/some-program is linked for /lib64/ld-linux-x86-64.so.9"]),
    ):
        for command in ([f"/srv/bin/{name}"], [name]):
            line = kip.refused("run", *volume, "-e", "PATH=/usr/bin:/srv/bin", "--name", "nothing", "--", *command)
            assert all(word in line for word in words), line
        for line in (kip.refused("run", *volume, "-w", "/srv", "--name", "nothing", "--", f"bin/{name}"), kip.refused("exec", "there", f"/srv/bin/{name}")):
            assert words[0].split(" ", 3)[3] in line, line
    assert kip.names() == ["there"] and proc.state == "running"
    tar = programs.tarball(tmp_path / "own.tar", {"opt/python/bin/python3": Path("/usr/bin/env")})
    assert kip.run("fine", ["/srv/bin/some-script"], flags=volume, tar=tar).name == "fine"


# promise trouble: an unknown proc
def test_unknown_proc(kip: Kip) -> None:
    for words in (["inspect"], ["stop"], ["start"], ["rm"], ["wake"], ["why"], ["logs"]):
        assert "nobody" in kip.refused(*words, "nobody")
    assert "nobody" in kip.refused("sleep", "nobody", "--to", "parked")
    assert "nobody" in kip.refused("exec", "nobody", "--", "true")


# promise trouble: the same name twice
def test_same_name_twice(kip: Kip) -> None:
    proc = kip.run("twin", ["sleep", "1000"])
    line = kip.refused("run", "--name", "twin", "--", "sleep", "1")
    assert "twin" in line
    assert proc.state == "running" and kip.names() == ["twin"]
    proc.sleep()
    assert "twin" in kip.refused("run", "--name", "twin", "--", "sleep", "1")
    assert proc.state == "parked"


# promise trouble: the same port twice in one proc
def test_same_port_twice_in_one_proc(kip: Kip) -> None:
    line = kip.refused("run", "--name", "two", "--port", "28123:80", "--port", "28123:81", "--", "sleep", "9")
    assert "28123" in line and kip.names() == []


# promise trouble: a program that exits at once
def test_program_that_exits_at_once(kip: Kip) -> None:
    line = kip.refused(
        "run", "--name", "short", "--port", "80", "--wait-ready", "--", "sh", "-c", "echo why-it-failed >&2; exit 3"
    )
    assert "short" in line and re.search(r"\b3\b", line), "the line has the program's exit code"
    # Without --wait-ready it has been exec'd, which is all that was asked; how it ended is kept.
    done = kip.cli("run", "--name", "brief", "--", "sh", "-c", "echo last words; exit 5", check=False)
    assert done.returncode == 0, done.stderr
    view = Proc(kip, "brief").wait_state("stopped", 30)
    assert (view["exit"], view["exit_code"]) == ("exit code 5", 5) and view["pids"] == [] and view["tier"] is None, view
    assert "last words" in Proc(kip, "brief").logs()
    assert "5" in kip.cli("ps").stdout


# promise trouble: limits too small to start
def test_limits_too_small_to_start(kip: Kip) -> None:
    for flags in (["--mem", "16K"], ["--pids", "1"], ["--cpus", "0"], ["--mem", "0"], ["--cpus", "-1"]):
        done = kip.cli("run", "--name", "tiny", *flags, "--", "sleep", "1000", check=False, timeout=60)
        assert done.returncode in (1, 2), f"{flags}: exit {done.returncode} {done.stderr}"
        if done.returncode == 1:
            one_line_refusal(done)
        assert kip.names() == [], flags


# promise trouble: hostile tarball: absolute paths, .., links out, devices, bombs
# held by: this, `crates/sandbox/tests/archive.rs::paths_out_are_refused`,
#   `crates/sandbox/tests/archive.rs::bombs_are_refused`
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", list(archives.HOSTILE))
def test_hostile_tarball(kip: Kip, tmp_path: Path, name: str) -> None:
    path = archives.write(tmp_path, name)
    procs = kip.data / "procs"
    before = disk_used(kip.data)
    done = kip.cli("run", "--name", "hostile", "--tar", path, "--", "sleep", "1000", check=False, timeout=240)
    escaped = os.path.lexists(archives.TARGET)
    if escaped:
        os.unlink(archives.TARGET)
    assert not escaped, "it wrote outside"
    if name in archives.MAY_BE_TAKEN and done.returncode == 0:
        return
    line = one_line_refusal(done)
    assert str(path) in line or path.name in line, line
    assert kip.names() == []
    assert not [p for p in procs.rglob("*") if procs.exists() and "hostile" in p.parts], "something of it is left"
    assert disk_used(kip.data) - before < 1 << 20


def disk_used(path: Path) -> int:
    return int(subprocess.run(["du", "-s", "--block-size=1", path], capture_output=True, text=True).stdout.split()[0])


# promise trouble: a tarball that is not there
def test_tarball_that_is_not_there(kip: Kip) -> None:
    assert "/no/such.tar" in kip.refused("run", "--name", "x", "--tar", "/no/such.tar", "--", "true")
    assert kip.names() == []


# promise P1: a proc runs from a tarball over that base
# held by: this, `crates/sandbox/tests/sandbox.rs::a_tarball_and_pins_lie_over_the_base`
def test_good_tarballs(kip: Kip, tmp_path: Path) -> None:
    """Plain, gzip; links that are followed inside only; owners, modes and times are kept."""
    content = archives.archive(
        archives.entry("srv/data/f", data=b"data"), archives.entry("srv/link", b"2", link="/srv/data/f"),
        archives.entry("srv/hard", b"1", link="srv/data/f"),
    )  # fmt: skip
    for suffix, data in (("tar", content), ("tar.gz", gzip.compress(content))):
        path = tmp_path / f"good.{suffix}"
        path.write_bytes(data)
        proc = kip.run("good", ["sleep", "1000"], tar=path)
        assert proc.exec("cat", "/srv/link", "/srv/hard").stdout == "datadata"
        proc.remove()


# promise trouble: `kip down` ends no proc without a word: it asks at a terminal, and elsewhere
#   wants `--all`; stopped ones are in no danger
def test_down_asks(fresh_kip: Callable[..., Kip]) -> None:
    kip = fresh_kip()
    awake, asleep = (kip.run(name, ["sleep", "1000"]) for name in ("awake", "asleep"))
    asleep.sleep()
    line = kip.refused("down")
    assert "ends 2 procs that are awake or asleep" in line and "asleep, awake" in line and "--all" in line, line
    assert kip.cli("down", "--park", "--all", check=False).returncode == 2
    for answer in ("n", "", "yesterday"):
        user = Typist(kip, "down")
        user.see(r"End them\? \[y/N\] ")
        user.type(f"{answer}\n")
        user.see("nothing was ended")
        assert user.process.wait(20) == 1
    assert (awake.state, asleep.state) == ("running", "parked")
    user = Typist(kip, "down")
    user.see(r"End them\? \[y/N\] ")
    user.type("y\n")
    user.see("ended, and with it")
    assert user.process.wait(60) == 0 and kip.wait_dead() == 0
    kip.up()
    assert [awake.state, asleep.state] == ["stopped", "stopped"]
    kip.cli("down")
    assert kip.wait_dead() == 0


# promise trouble: no daemon; a second daemon on one directory
# held by: this, `tests/test_cli.py::test_second_daemon_on_one_directory`
def test_no_daemon(kip: Kip, tmp_path: Path) -> None:
    for words in (["ps"], ["run", "--", "true"], ["down"]):
        done = subprocess.run(
            [kip.program, "--data", tmp_path / "nothing", *words], capture_output=True, text=True, timeout=20
        )
        assert "up" in one_line_refusal(done)


# promise invariants: 3 one live instance, on one machine
# held by: this,
#   `kip_records::instance::tests::a_lock_whose_file_is_removed_by_its_holder_is_one_holders_only`,
#   `kip_api::lock::tests::a_second_daemon_is_refused_with_the_first_ones_pid_until_it_is_gone`
def test_second_daemon_on_one_directory(kip: Kip) -> None:
    done = subprocess.run([kip.program, "--data", kip.data, "up"], capture_output=True, text=True, timeout=20)
    line = one_line_refusal_of_up(done)
    assert str(kip.info()["pid"]) in line or str(kip.data) in line, line
    assert kip.alive()


def one_line_refusal_of_up(done: subprocess.CompletedProcess[str]) -> str:
    """The daemon also logs to stderr; what it says to the person is the last line."""
    lines = COLOURS.sub("", done.stderr).strip().splitlines()
    said = [line for line in lines if line.startswith("kip:")]
    assert len(said) == 1, done.stderr
    return one_line_refusal(subprocess.CompletedProcess(done.args, done.returncode, done.stdout, said[0] + "\n"))


# promise trouble: no root
def test_no_root(kip: Kip, tmp_path: Path) -> None:
    program = Path("/tmp") / f"kip-test-binary-{os.getpid()}"  # the build directory may be closed to others
    program.write_bytes(kip.program.read_bytes())
    program.chmod(0o755)
    try:
        nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        data = tmp_path / "data"
        done = subprocess.run([*nobody, program, "--data", data, "up"], capture_output=True, text=True, timeout=20)
        assert "root" in one_line_refusal_of_up(done)
        assert not data.exists()
        done = subprocess.run([*nobody, program, "--data", kip.data, "ps"], capture_output=True, text=True, timeout=20)
        assert done.returncode == 1 and len(done.stderr.strip().splitlines()) == 1, done.stderr
    finally:
        program.unlink()


# promise trouble: no CRIU, too old, something else
@pytest.mark.parametrize("case", ["missing", "too old", "not a criu", "not executable"])
def test_no_criu(kip: Kip, tmp_path: Path, case: str) -> None:
    fake = tmp_path / "criu"
    if case != "missing":
        version = "Version: 3.17" if case == "too old" else "hello"
        fake.write_text(f"#!/bin/sh\necho '{version}'\n")
        fake.chmod(0o644 if case == "not executable" else 0o755)
    before = leftovers.Machine.now()
    data = tmp_path / "data"
    words = [kip.program, "--data", data, "up", "--criu", fake]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    line = one_line_refusal_of_up(done)
    assert "criu" in line.lower(), line
    if case == "too old":
        assert "3.17" in line and "4.2" in line, "it says which version there is and which is needed"
    # Daemons beside it write files anew, which are there under another name for a moment.
    wait_for("nothing is left", lambda: not leftovers.left(before, data, None))


# JSON and tables

VIEW_KEYS = {
    "name", "realm", "state", "tier", "worker", "generation", "ports", "pids", "memory", "last_sleep", "last_wake", "exit",
    "exit_code", "idle_ms", "next_timer_ms", "spec",
}  # fmt: skip


@pytest.fixture
def web(kip: Kip, tmp_path: Path) -> Proc:
    server = servers.lighttpd()
    return kip.run(
        "web", server.command, ports=server.published, tar=server.tarball(tmp_path), flags=["--env", "HIDDEN=not-shown"]
    )


# promise command-line: run, ps, inspect, start, stop, rm, `--json` shapes
# held by: this, `tests/test_cli.py::test_stop_start_remove`,
#   `crates/cli/tests/command.rs::a_proc_through_its_life`
# promise command-line: environment values are left out of listings
def test_shapes(kip: Kip, web: Proc) -> None:
    """inspect and ps have every key that scripts rely on, hot and parked."""
    hot = web.inspect()
    assert VIEW_KEYS <= hot.keys(), VIEW_KEYS - hot.keys()
    assert (hot["name"], hot["realm"], hot["state"], hot["tier"], hot["generation"]) == (
        "web",
        "default",
        "running",
        "hot",
        0,
    )
    assert hot["pids"] and all(leftovers.is_alive(pid) for pid in hot["pids"])
    assert hot["memory"]["rss_bytes"] >= hot["memory"]["pss_bytes"] > 100_000
    assert {"rss_bytes", "pss_bytes", "kernel_bytes", "swap_bytes", "working_set_pages"} <= hot["memory"].keys()
    (port,) = hot["ports"]
    assert {"proto", "port", "host_addr", "host_port"} <= port.keys() and (port["proto"], port["port"]) == ("tcp", 8080)
    assert hot["last_sleep"] is None and hot["last_wake"] is None and hot["exit"] is None and hot["exit_code"] is None
    begun = time.time()
    parked = web.sleep()
    assert parked["tier"] == "parked" and parked["memory"]["rss_bytes"] == 0
    sleep = parked["last_sleep"]
    assert sleep["to"] == "parked" and 0 < sleep["frozen_us"] <= sleep["total_us"] and sleep["bytes_written"] > 10_000
    assert begun - 1 < sleep["at_ms"] / 1000 < time.time() + 1
    http_get(web.port(), "/page.html")
    awake = web.wait_state("running")
    wake = awake["last_wake"]
    assert wake["from"] == "parked" and "tcp" in wake["trigger"] and "8080" in wake["trigger"]
    assert wake["steps"] and all(step["name"] and step["us"] >= 0 for step in wake["steps"])
    assert sum(step["us"] for step in wake["steps"]) <= wake["total_us"] * 1.5
    (listed,) = kip.json("ps")
    assert VIEW_KEYS <= listed.keys() and listed["name"] == "web"
    assert "not-shown" not in json.dumps(kip.json("ps")), "listings leave out the values of the environment"


# promise command-line: aligned tables
# held by: this, `kip_cli::details::tests::files_are_aligned_and_bounds_are_said`,
#   `kip_cli::details::tests::maps_show_the_columns_that_say_something`,
#   `kip_cli::view::tests::ps_is_an_aligned_table`
def test_table(kip: Kip, web: Proc) -> None:
    """Aligned columns under a head."""
    kip.run("a-much-longer-name", ["sleep", "1000"])
    head, *rows = kip.cli("ps").stdout.rstrip().splitlines()
    assert head.split()[:3] == ["NAME", "STATE", "TIER"] and len(rows) == 2
    at = head.index("STATE")
    assert all(row[at - 1] == " " and row[at:].startswith("running") for row in rows), rows
    assert {row.split()[0] for row in rows} == {"web", "a-much-longer-name"}
    assert "web" in kip.cli("inspect", "web").stdout


# promise command-line: why: awake or asleep, refused sleeps with their causes and when
# held by: this, `tests/test_why_top.py::test_why_tells_when_a_sleep_was_refused`,
#   `tests/test_trouble.py::test_what_cannot_be_parked_runs_on`
def test_why_of_a_sleeper_and_of_the_awake(kip: Kip, web: Proc) -> None:
    awake = kip.json("why", "web")
    assert awake["state"] == "running" and awake["awake_because"] and awake["cannot_sleep"] == []
    web.sleep()
    asleep = kip.json("why", "web")
    assert asleep["awake_because"] == [] and asleep["state"] == "parked"
    http_get(web.port(), "/page.html")
    assert "tcp" in kip.json("why", "web")["last_wake"]["trigger"]


# promise waking: `kip wake`, `kip exec`
# held by: this, `tests/test_torture.py::test_wake_by_exec`
@pytest.mark.smoke
def test_sleep_and_wake_twice(kip: Kip, web: Proc) -> None:
    """Both are done when they return, and doing what is done is not an error."""
    first = web.sleep()
    kip.cli("sleep", "web", "--to", "parked")
    assert web.inspect()["generation"] == first["generation"], "a sleeper is not woken to be parked again"
    web.wake()
    assert web.state == "running"
    kip.cli("wake", "web")
    assert web.state == "running"


# promise command-line: events, `-f`
def test_events(kip: Kip, web: Proc) -> None:
    """What happened, in order; with -f new ones as they come."""
    follow = subprocess.Popen(
        [kip.program, "--data", kip.data, "events", "-f", "--json"], stdout=subprocess.PIPE, text=True
    )
    try:
        web.sleep()
        http_get(web.port(), "/page.html")
        web.stop()
        web.start()
        web.remove()
        wanted = ["started", "parking", "parked", "waking", "woken", "stopped", "started", "removed"]
        kinds = [e["kind"] for e in kip.events() if e["name"] == "web"]
        assert is_subsequence(wanted, kinds), kinds
        assert follow.stdout
        seen: list[str] = []
        os.set_blocking(follow.stdout.fileno(), False)

        def all_seen() -> bool:
            for line in follow.stdout or []:
                event = json.loads(line)
                assert {"at_ms", "name", "kind", "detail"} <= event.keys()
                if event["name"] == "web":
                    seen.append(event["kind"])
            return is_subsequence(wanted, seen)

        wait_for("the follower has seen it all", all_seen, 30)
    finally:
        follow.terminate()
        follow.wait(5)
    times = [e["at_ms"] for e in kip.events()]
    assert times == sorted(times)


def is_subsequence(wanted: list[str], seen: list[str]) -> bool:
    it = iter(seen)
    return all(w in it for w in wanted)


# exec


# promise command-line: exec: code, streams, environment; ends with its client
# held by: this, `tests/test_cli.py::test_exec_that_is_interrupted_ends_inside`
def test_exec(kip: Kip) -> None:
    proc = kip.run("shell", ["sleep", "1000"], flags=["--env", "FROM=spec", "--workdir", "/tmp"])
    for code in (0, 1, 3, 77, 255):
        assert proc.exec("sh", "-c", f"exit {code}", check=False).returncode == code
    assert proc.exec("sh", "-c", "kill -9 $$", check=False).returncode == 128 + 9
    assert proc.exec("sh", "-c", "kill -TERM $$", check=False).returncode == 128 + 15
    done = proc.exec("sh", "-c", "echo out; echo err >&2")
    assert (done.stdout, done.stderr) == ("out\n", "err\n")
    assert proc.exec("cat", input="through stdin\n").stdout == "through stdin\n"
    big = "x" * 3_000_000
    assert proc.exec("cat", input=big).stdout == big
    assert proc.exec("sh", "-c", "echo $FROM $HOSTNAME $HOME").stdout == "spec shell /root\n"
    # The program's own name for itself, ids and namespaces are those of the proc.
    assert proc.exec("hostname").stdout == "shell\n"
    assert proc.exec("cat", "/proc/1/comm").stdout != Path("/proc/1/comm").read_text()
    missing = proc.exec("/no/such/program", check=False)
    assert missing.returncode in (1, 126, 127) and len(missing.stderr.strip().splitlines()) == 1, missing
    words = [kip.program, "--data", kip.data, "exec", "shell", "--", "sh", "-c", "head -c 100000000 /dev/zero"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as p:
        assert p.stdout
        p.stdout.read(1000)
        p.stdout.close()  # the reader has seen enough
        p.wait(20)
    assert proc.state == "running"


def test_exec_that_is_interrupted_ends_inside(kip: Kip) -> None:
    """Ctrl-C at `kip exec` does not leave the program running inside for ever."""
    kip.run("shell", ["sleep", "1000"])
    seconds = f"7{os.getpid()}"  # by which it is known among all processes of the machine
    words = [kip.program, "--data", kip.data, "exec", "shell", "--", "sleep", seconds]

    def running() -> bool:
        return any(f"sleep {seconds}" in line for line, _, _ in leftovers.processes().values() if "kip" not in line)

    with subprocess.Popen(words) as p:
        wait_for("it runs", running, 30)
        p.send_signal(signal.SIGINT)
        p.wait(10)
    wait_for("it is gone inside", lambda: not running(), 30)


# logs


# promise command-line: logs, `-f`, `--tail`, kept across sleeps and stops
# held by: this, `tests/test_torture.py::test_output_across_sleeps`
def test_logs(kip: Kip, tmp_path: Path) -> None:
    """Kept across sleeps and stops; -f goes on; the newest lines only on request."""
    server = servers.torture()
    proc = kip.run("talker", server.command, ports=server.published, tar=server.tarball(tmp_path))
    follow = subprocess.Popen(
        [kip.program, "--data", kip.data, "logs", "-f", "talker"], stdout=subprocess.PIPE, text=True
    )
    try:
        client = Lines(proc.port())
        for i in range(3):
            client.ask(f"say line {i}")
            proc.sleep()
        client.ask("say last")
        assert follow.stdout
        assert [follow.stdout.readline().strip() for _ in range(4)] == ["line 0", "line 1", "line 2", "last"]
    finally:
        follow.terminate()
        follow.wait(5)
    wanted = ["line 0", "line 1", "line 2", "last"]
    wait_for("all is in the log", lambda: proc.logs().splitlines() == wanted, 30)
    assert kip.cli("logs", "--tail", "2", "talker").stdout.splitlines() == wanted[-2:]
    proc.sleep()
    assert proc.logs().splitlines() == wanted and proc.state == "parked", "reading logs does not wake"
    proc.stop()
    assert proc.logs().splitlines() == wanted, "stop keeps the logs"
    proc.start()
    wait_for("it serves again", lambda: proc.state == "running", 30)
    assert proc.logs().splitlines()[:4] == wanted


# promise command-line: `--log-size`, `--log-files`: a log is as large as its owner says, 3 files of
#   10 MiB without a word
# held by: this, `kip_describe::file::tests::every_key_is_read`
def test_logs_are_as_large_as_their_owner_says(kip: Kip) -> None:
    script = "for i in range(20000): print('%06d' % i, 'x' * 30)\nimport time; print('end', flush=True); time.sleep(1000)"
    proc = kip.run("brief", ["/usr/bin/python3", "-c", script], flags=["--log-size", "64K", "--log-files", "2"])
    wait_for("it has written all", lambda: "end" in kip.cli("logs", "--tail", "1", "brief").stdout, 60)
    files = {path.name: path.stat().st_size for path in (kip.data / "procs" / "brief" / "logs").iterdir()}
    assert set(files) == {"current", "current.1"} and all(size < 512 << 10 for size in files.values()), files
    numbers = [int(text.split()[0]) for text in proc.logs().splitlines()[:-1]]
    assert numbers == list(range(numbers[0], 20000)) and numbers[0] > 0
    limits = proc.inspect()["spec"]["limits"]
    assert (limits["log_bytes"], limits["log_files"]) == (64 << 10, 2)
    assert "at least 65536" in kip.refused("run", "--log-size", "1K", "--", "true")
    assert "1 to 16 files, not 17" in kip.refused("run", "--log-files", "17", "--", "true")


# promise command-line: logs are rotated; a program is not held up by its log
# held by: this, `tests/test_cli.py::test_program_is_not_held_up_by_its_log`
@pytest.mark.timeout(300)
def test_log_rotation(kip: Kip) -> None:
    """A program that writes without end does not fill the disk, and the newest lines are there in order."""
    lines, line = 1_000_000, "x" * 60  # twice what is kept
    script = (
        f"for i in range({lines}): print('%08d {line}' % i)\nimport time; print('end', flush=True); time.sleep(1000)"
    )
    proc = kip.run("chatty", ["/usr/bin/python3", "-c", script])
    wait_for("it has written all", lambda: "end" in kip.cli("logs", "--tail", "1", "chatty").stdout, 170, every=0.2)
    written = lines * 70
    kept = disk_used(kip.data / "procs" / "chatty" / "logs")
    assert kept < written / 2, f"{kept >> 20} MiB of {written >> 20} MiB written are kept: it is not rotated"
    numbers = [int(text.split()[0]) for text in proc.logs().splitlines()[:-1]]
    assert numbers[-1] == lines - 1 and len(numbers) > 10_000
    assert numbers == list(range(numbers[0], lines)), "lines are missing between"


@pytest.mark.timeout(400)
def test_program_is_not_held_up_by_its_log(kip: Kip) -> None:
    """No process reads the log; the program writes at its own pace, or at that of a disk that is slower than any."""
    script = """
import time
begun = time.monotonic()
for i in range(200000):
    print("x" * 50)
print("took", time.monotonic() - begun, flush=True)
time.sleep(1000)
"""
    proc = kip.run("writer", ["/usr/bin/python3", "-u", "-c", script])
    wait_for("it is through", lambda: "took" in kip.cli("logs", "--tail", "1", "writer").stdout, 120, every=0.2)
    took = float(proc.logs().split()[-1])
    if took >= 20:  # the same without Kip, into a file beside the log
        plain = "script=$1; shift; /usr/bin/python3 -u -c \"$script\" | tee \"$1\" | tail -n 1"
        script = script.replace("time.sleep(1000)", "")
        words = ["sh", "-c", plain, "sh", script, kip.data / "plain"]
        alone = float(subprocess.run(words, capture_output=True, text=True, check=True, timeout=170).stdout.split()[-1])
        (kip.data / "plain").unlink()
        assert took < 3 * alone, f"{took} s, and {alone} s without Kip"


# promise commands: `kip doctor` finds nothing essential missing where all works
def test_doctor(kip: Kip) -> None:
    """It says what it looked at; here, where everything else works, nothing essential is missing."""
    done = kip.cli("doctor", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for word in ("criu", "cgroup", "overlay"):
        assert word in done.stdout.lower(), done.stdout
    json.loads(kip.cli("doctor", "--json").stdout)


# stop, start, rm


# promise recovery: `kip stop` and `kip rm` leave no process, mount, cgroup, rule
# held by: this, `tests/test_cli.py::test_remove_leaves_nothing_on_the_machine`
def test_stop_start_remove(kip: Kip, tmp_path: Path) -> None:
    """stop keeps name, files and logs; rm wants it stopped, or force; both leave no process."""
    server = servers.torture()
    proc = kip.run("cycle", server.command, ports=server.published, tar=server.tarball(tmp_path))
    proc.exec("sh", "-c", "echo kept > /var/lib/kept")
    assert "cycle" in kip.refused("rm", "cycle"), "a running proc is not removed without --force"
    for asleep in (False, True):
        pids = proc.inspect()["pids"]
        if asleep:
            proc.sleep()
        proc.stop()
        view = proc.inspect()
        assert view["state"] == "stopped" and view["pids"] == [] and view["tier"] is None
        assert not [pid for pid in pids if leftovers.is_alive(pid)]
        assert "cycle" in kip.refused("sleep", "cycle", "--to", "parked")
        assert "cycle" in kip.refused("exec", "cycle", "--", "true")
        proc.start()
        wait_for("it listens", lambda: can_connect(proc.port()), 30)
        assert proc.exec("cat", "/var/lib/kept").stdout == "kept\n"
        Lines(proc.port()).check()
    proc.stop()
    kip.cli("rm", "cycle")
    assert kip.names() == []
    assert not (kip.data / "procs" / "cycle").exists(), "rm keeps nothing"


def can_connect(port: int) -> bool:
    try:
        Lines(port).close()
        return True
    except OSError:
        return False


def test_remove_leaves_nothing_on_the_machine(kip: Kip, tmp_path: Path) -> None:
    """Not only `kip down`: each rm takes its interfaces, cgroups, mounts and rules with it."""
    server = servers.lighttpd()
    assert kip.instance is not None

    def traces() -> list[str]:
        pids = [os.getpid(), *(pid for pid, (line, _, _) in leftovers.processes().items() if str(kip.data) in line)]
        mounts = [
            m for pid in pids for m in Path(f"/proc/{pid}/mountinfo").read_text().splitlines() if "procs/trace" in m
        ]
        cgroups = [str(p) for p in Path("/sys/fs/cgroup").glob(f"*/kip-{kip.instance}/*trace*") if p.is_dir()]
        rules = subprocess.run(["nft", "list", "table", "inet", f"kip_{kip.instance}"], capture_output=True, text=True)
        return mounts + cgroups + re.findall(r".*\b29777\b.*", rules.stdout)

    for asleep in (False, True):
        proc = kip.run("trace", server.command, ports=["29777:8080"], tar=server.tarball(tmp_path))
        if asleep:
            proc.sleep()
        proc.remove()
        wait_for("nothing of it is left", lambda: not traces(), 30)
        assert not (kip.data / "procs" / "trace").exists()
