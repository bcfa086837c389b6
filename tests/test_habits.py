"""What users of Docker and Podman type: short flags, several names, filters, formats, times; and words that have no equal."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.clients import free_port
from harness.kip import Kip, Proc, one_line_refusal
from harness.wait import wait_for


@pytest.fixture(autouse=True)
def nothing_left(kip: Kip) -> Iterator[None]:
    yield
    kip.remove_all()


# promise command-line: `-p -e -v -w -u -m -l --hostname --add-host` as docker has them, a relative
#   path for `-v`; labels and host names are kept in every tier
# held by: this, `kip_cli::args::tests::docker_s_short_flags_are_kip_s`
def test_short_flags(kip: Kip, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "file").write_text("from the host\n")
    port = free_port()
    words = f"run --name short -p {port}:80 -e A=b -e FROM_HERE -v ./x:/x:ro -w /srv -u 1000 -m 64m -l team=shop -l alone --init".split()
    words += ["--hostname", "front", "--add-host", "db:192.0.2.7", "--", "sleep", "1000"]
    command = [kip.program, "--data", kip.data, *words]
    environment = os.environ | {"FROM_HERE": "here"}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=60, capture_output=True)
    proc = Proc(kip, "short")
    script = "cat /x/file; pwd; id -u; echo $A $FROM_HERE $HOSTNAME; uname -n; cat /etc/hostname; grep 192 /etc/hosts"
    seen = "from the host\n/srv\n1000\nb here front\nfront\nfront\n192.0.2.7\tdb\n"
    for tier in ("hot", "parked"):
        if tier == "parked":
            proc.sleep()
        assert proc.exec("sh", "-c", script).stdout == seen, tier
    view = proc.inspect()
    assert view["spec"]["labels"] == {"team": "shop", "alone": ""} and view["spec"]["hostname"] == "front"
    assert (view["ports"][0]["host_port"], view["spec"]["limits"]["memory_bytes"]) == (port, 64 << 20)
    text = kip.cli("inspect", "short").stdout
    assert re.search(r"label +team=shop", text) and re.search(r"host name +front", text) and "db:192.0.2.7" in text
    # They are in what makes the same one elsewhere.
    exported = kip.cli("export", "short").stdout
    assert 'hostname = "front"' in exported and 'team = "shop"' in exported and "db:192.0.2.7" in exported
    line = kip.cli("run", "-e", "NOT_SET_ANYWHERE", "--", "true", check=False)
    assert line.returncode == 2 and "NOT_SET_ANYWHERE has no value here" in line.stderr


# promise command-line: `--ulimit`: the program and what runs beside it by exec have them, asleep
#   and awake again; a hard limit above the daemon's own is refused
# held by: this, `kip_types::spec::ulimit::tests::limits_are_written_as_they_are_read`
@pytest.mark.parametrize("tier", ["hibernated", "parked"])
def test_ulimits(kip: Kip, tier: str) -> None:
    flags = ["--ulimit", "nofile=200:300", "--ulimit", "core=0", "--ulimit", "stack=4194304:unlimited"]
    proc = kip.run("limited", ["sleep", "1000"], flags=flags)

    def limits() -> dict[str, tuple[str, str]]:
        text = Path(f"/proc/{proc.inspect()['pids'][-1]}/limits").read_text()
        found = re.findall(r"^Max (open files|core file size|stack size) +(\S+) +(\S+)", text, re.MULTILINE)
        return {name: (soft, hard) for name, soft, hard in found}

    expected = {"open files": ("200", "300"), "core file size": ("0", "0"), "stack size": ("4194304", "unlimited")}
    assert limits() == expected
    kip.cli("sleep", "limited", "--to", tier)
    proc.wake()
    assert limits() == expected
    assert proc.exec("sh", "-c", "ulimit -Sn; ulimit -Hn; ulimit -c").stdout == "200\n300\n0\n"
    assert "nofile=200:300" in kip.cli("inspect", "limited").stdout
    assert "a hard limit cannot be above the daemon's own" in kip.refused("run", "--ulimit", "nofile=99999999", "--", "true")
    assert "the limit core is given twice" in kip.refused("run", "--ulimit", "core=0", "--ulimit", "core=1", "--", "true")
    assert kip.names() == ["limited"]


# promise command-line: labels, host names and further hosts of a kip.toml and of a Compose file
# held by: this, `kip_describe::compose::tests::what_kip_lacks_is_named_and_weighed`
def test_labels_of_files(kip: Kip, tmp_path: Path) -> None:
    file = tmp_path / "kip.toml"
    lines = ['command = "sleep 1000"', 'hostname = "front"', 'add-host = ["db:192.0.2.7"]', 'label = { team = "shop" }']
    file.write_text("\n".join(["[proc.filed]", *lines]))
    kip.cli("apply", "-f", file)
    assert kip.cli("diff", "-f", file, check=False).returncode == 0
    assert kip.cli("ps", "-q", "--filter", "label=team=shop").stdout == "filed\n"
    file.write_text(file.read_text().replace('team = "shop"', 'team = "other"'))
    assert "label" in kip.cli("diff", "-f", file, check=False).stdout


# promise command-line: the first word is an image, a program of this machine comes after `--`; one
#   that is meant is named
# held by: this, `kip_cli::args::tests::the_first_word_is_an_image_unless_dashes_come_before_it`
def test_image_or_program(kip: Kip) -> None:
    line = kip.refused("run", "--pull", "never", "sleep", "1000")
    assert "a program of this machine comes after `--`: kip run -- sleep" in line, line
    line = kip.refused("run", "--pull", "never", "no-such-image-anywhere")
    assert "comes after" not in line, line
    assert kip.names() == []


# promise command-line: start, stop, restart, kill, rm, sleep, wake, wait and inspect take several
#   names; each is tried, each failure is a line, and the exit code is then 1
# held by: this, `kip_cli::many::tests::each_is_tried`
def test_several_names(kip: Kip) -> None:
    one, two = kip.run("one", ["sleep", "1000"]), kip.run("two", ["sleep", "1000"])

    def tried(*words: str, failures: int = 1) -> subprocess.CompletedProcess[str]:
        done = kip.cli(*words, check=False)
        lines = done.stderr.splitlines()
        assert done.returncode == (1 if failures else 0), (words, done.stderr)
        assert len(lines) == failures and all(line.startswith("kip: ") and "nobody" in line for line in lines), lines
        return done

    tried("sleep", "one", "nobody", "two")
    assert one.state == two.state == "parked"
    tried("wake", "nobody", "one", "two", failures=1)
    assert one.state == two.state == "running"
    views = [json.loads(line) for line in tried("inspect", "one", "nobody", "two", "--json").stdout.splitlines()]
    assert [view["name"] for view in views] == ["one", "two"]
    assert len(kip.cli("inspect", "one", "two").stdout.split("\n\n\n")) == 1
    tried("stop", "-t", "5", "one", "nobody", "two")
    assert one.state == two.state == "stopped"
    tried("start", "one", "two", failures=0)
    tried("kill", "nobody", "one", "two")
    assert (one.inspect()["exit"], two.inspect()["exit"]) == ("signal 9", "signal 9")
    tried("rm", "-f", "one", "nobody", "two")
    assert kip.names() == []


# promise command-line: restart ends a proc and starts it on its files, a sleeping or stopped one
#   too
def test_restart(kip: Kip) -> None:
    proc = kip.run("again", ["sh", "-c", "echo started; exec sleep 1000"])
    proc.exec("touch", "/kept")
    wait_for("it said so", lambda: proc.logs().count("started") == 1, 10)
    for starts in (2, 3, 4):
        if starts == 3:
            proc.sleep()
        elif starts == 4:
            proc.stop()
        assert kip.cli("restart", "-t", "0", "again").stdout == "again\n"
        assert proc.state == "running" and proc.exec("ls", "/kept").stdout == "/kept\n"
        wait_for("it said so again", lambda starts=starts: proc.logs().count("started") == starts, 10)


# promise command-line: "did you mean" for an unknown proc, flag, key of a filter, field of a format
# held by: this, `kip_types::nearest::tests::the_nearest_word_is_found`
def test_did_you_mean(kip: Kip) -> None:
    kip.run("webshop", ["sleep", "1000"])
    for words in (["inspect", "webshp"], ["stop", "webshops"], ["logs", "Webshop".lower()[:-1]], ["why", "wbeshop"]):
        assert "did you mean webshop?" in kip.refused(*words), words
    assert "there are webshop" in kip.refused("inspect", "entirely-another")
    for words, meant in (
        (["ps", "--filter", "nam=x"], "did you mean name?"),
        (["ps", "--format", "{{.Stat}}"], "did you mean .State?"),
        (["events", "--filter", "knd=x"], "did you mean kind?"),
        (["ps", "--filtr", "x=y"], "'--filter'"),
    ):
        done = kip.cli(*words, check=False)
        assert done.returncode == 2 and meant in done.stderr, done.stderr


# promise command-line: `ps -a -q --filter --format`; age and exit code in its table
# held by: this, `kip_cli::ps::tests::filters_look_at_the_spec`,
#   `kip_text::format::tests::what_is_not_supported_is_told`
def test_ps(kip: Kip) -> None:
    kip.run("front", ["sleep", "1000"], flags=["-l", "team=shop", "-l", "tier=1"], ports=())
    kip.run("back", ["sleep", "1000"], flags=["-l", "team=shop", "--network", "inside"]).sleep()
    ended = kip.run("ended", ["sh", "-c", "exit 7"])
    ended.wait_state("stopped")

    def listed(*words: str) -> list[str]:
        return kip.cli("ps", "-q", *words).stdout.split()

    assert listed() == listed("-a") == ["back", "ended", "front"]
    assert listed("--filter", "label=team") == listed("-f", "label=team=shop") == ["back", "front"]
    assert listed("--filter", "label=team=shop", "--filter", "label=tier=1") == ["front"]
    assert listed("--filter", "state=parked") == listed("--filter", "tier=parked") == ["back"]
    assert listed("--filter", "state=stopped", "--filter", "state=running") == ["ended", "front"]
    assert listed("--filter", "status=exited", "--filter", "label=team") == []
    assert listed("--filter", "name=end") == ["ended"] and listed("--filter", "network=inside") == ["back"]
    assert listed("--filter", "image=host") == ["back", "ended", "front"] and listed("--filter", "image=nginx") == []
    assert kip.json("ps", "-q", "--filter", "name=front") == ["front"]
    assert [view["name"] for view in kip.json("ps", "--filter", "name=front")] == ["front"]
    assert kip.cli("ps", "--format", "{{.Name}} {{.State}}/{{.Exit}}").stdout == "back parked/-\nended stopped/7\nfront running/-\n"
    table = kip.cli("ps", "--filter", "label=team", "--format", r'table {{.Names}}\t{{.Label "tier"}}').stdout
    assert table == "NAMES  TIER\nback\nfront  1\n"
    lines = kip.cli("ps", "--format", "json").stdout.splitlines()
    assert [json.loads(line)["name"] for line in lines] == ["back", "ended", "front"]
    head, *rows = kip.cli("ps").stdout.splitlines()
    row = next(row for row in rows if row.startswith("ended"))
    assert row[head.index("EXIT") :].startswith("7 ") and re.match(r"\d+(\.\d)?(ms|s|m)", row[head.index("AGE") :]), row


# promise command-line: `logs -n -t --since --until`
def test_logs(kip: Kip) -> None:
    proc = kip.run("writer", ["sh", "-c", "echo one; sleep 1; echo two; sleep 1; echo three; exec sleep 1000"])
    wait_for("it wrote all", lambda: "three" in proc.logs(), 20)
    stamped = kip.cli("logs", "-t", "writer").stdout.splitlines()
    times = [line.split()[0] for line in stamped]
    assert [line.split()[1] for line in stamped] == ["one", "two", "three"]
    assert kip.cli("logs", "-n", "1", "writer").stdout == "three\n"
    assert kip.cli("logs", "-n", "all", "writer").stdout == "one\ntwo\nthree\n"
    assert kip.cli("logs", "--until", times[1], "writer").stdout == "one\ntwo\n"
    assert kip.cli("logs", "--until", times[1], "-n", "1", "writer").stdout == "two\n"
    assert kip.cli("logs", "--since", times[1], "writer").stdout == "two\nthree\n"
    assert kip.cli("logs", "--since", times[1], "--until", times[1], "writer").stdout == "two\n"
    assert kip.cli("logs", "--since", "1h", "writer").stdout == "one\ntwo\nthree\n"
    assert kip.cli("logs", "--until", "1h", "writer").stdout == ""
    assert kip.cli("logs", "--since", "2999-01-01", "writer").stdout == ""


# promise command-line: events by time, kind and name; the newest are kept over restarts of the
#   daemon, also after SIGKILL
# held by: this, `kip_journal::events::tests::the_next_daemon_has_those_of_the_one_before`,
#   `kip_journal::events::file::tests::the_files_are_bounded`
def test_events_over_restarts(fresh_kip: Callable[..., Kip]) -> None:
    kip = fresh_kip()
    proc = kip.run("told", ["sleep", "1000"])
    proc.sleep()

    def seen(*words: str) -> list[tuple[int, str]]:
        lines = kip.cli("events", "--json", *words).stdout.splitlines()
        return [(event["id"], event["kind"]) for event in map(json.loads, lines)]

    before = seen("told")
    assert [kind for _, kind in before][0] == "started" and before[-1][1] == "parked"
    wait_for("they are on the disk", lambda: '"parked"' in (kip.data / "events.jsonl").read_text(), 10)
    for end in (kip.kill, lambda: kip.daemon.terminate() or kip.wait_dead()):
        end()
        kip.up()
        assert seen("told")[: len(before)] == before
    assert proc.state == "parked"
    proc.wake()
    after = seen("told")
    ids = [number for number, _ in after]
    assert ids == sorted(set(ids)) and after[-1][1] == "woken"
    assert {kind for _, kind in seen("--filter", "kind=woken")} == {"woken"}
    assert seen("--filter", "kind=woken", "--filter", "name=other") == []
    assert seen("--since", "1h", "told") == after and seen("--until", "1h") == []
    assert seen("--since", str(ids[-1])) == seen("--since", str(ids[-1]), "--filter", "kind=ready")
    assert (kip.data / "events.jsonl").stat().st_mode & 0o777 == 0o600


# promise command-line: `kip port`, of all ports and of one
def test_port(kip: Kip) -> None:
    web, dns = free_port(), free_port()
    kip.run("ports", ["sleep", "1000"], flags=["-p", f"127.0.0.1:{web}:80", "-p", f"{dns}:53/udp", "-p", "99,private"])
    assert kip.cli("port", "ports").stdout == f"80/tcp -> 127.0.0.1:{web}\n53/udp -> 0.0.0.0:{dns}\n"
    assert kip.cli("port", "ports", "80").stdout == f"127.0.0.1:{web}\n"
    assert kip.cli("port", "ports", "53/udp").stdout == f"0.0.0.0:{dns}\n"
    assert kip.json("port", "ports", "80")["host_port"] == web
    for port in ("53", "99", "81"):
        assert f"tcp port {port} of ports is not published" in kip.refused("port", "ports", port)


# promise command-line: `kip stats`, once and as it goes; it wakes no proc
def test_stats(kip: Kip) -> None:
    kip.run("busy", ["sh", "-c", "while :; do :; done"], flags=["-m", "64m"])
    asleep = kip.run("asleep", ["sleep", "1000"])
    asleep.sleep()
    kip.run("over", ["true"]).wait_state("stopped")
    rows = {row["name"]: row for row in kip.json("stats", "--no-stream")}
    assert rows.keys() == {"busy", "asleep"}
    assert rows["busy"]["cpu_percent"] > 1 and rows["busy"]["memory_limit_bytes"] == 64 << 20 and rows["busy"]["pids"] >= 2
    assert rows["asleep"]["tier"] == "parked" and rows["asleep"]["memory_bytes"] == 0
    assert len(kip.json("stats", "--no-stream", "--all")) == 3
    assert [row["name"] for row in kip.json("stats", "--no-stream", "asleep")] == ["asleep"]
    assert "did you mean busy?" in kip.refused("stats", "--no-stream", "bus")
    with subprocess.Popen([kip.program, "--data", kip.data, "stats", "busy"], stdout=subprocess.PIPE, text=True) as going:
        try:
            lines = [going.stdout.readline() for _ in range(4)]
        finally:
            going.terminate()
    assert lines[0].startswith("NAME ") and lines[0].split() == lines[2].split() and lines[1].startswith("busy ")
    assert asleep.state == "parked"


# promise command-line: `kip wait` without `--ready` returns when a proc has ended, with its exit
#   code
def test_wait_for_the_end(kip: Kip) -> None:
    proc = kip.run("ends", ["sh", "-c", "sleep 1; exit 7"])
    began = time.monotonic()
    assert kip.cli("wait", "ends").stdout == "7\n" and time.monotonic() - began < 30
    assert kip.cli("wait", "ends").stdout == "7\n", "it has ended already"
    assert kip.json("wait", "ends") == {"name": "ends", "exit": "exit code 7", "exit_code": 7}
    proc.remove()
    kip.run("stays", ["sleep", "1000"])
    assert "has not ended within 300ms" in kip.refused("wait", "--timeout", "300ms", "stays")
    waiting = subprocess.Popen([kip.program, "--data", kip.data, "wait", "stays"], stdout=subprocess.PIPE, text=True)
    kip.cli("kill", "stays")
    assert waiting.communicate(timeout=30)[0] == "137\n"
    done = kip.cli("wait", "stays", "nobody", check=False)
    assert done.stdout == "137\n" and "nobody" in one_line_refusal_of(done)


def one_line_refusal_of(done: subprocess.CompletedProcess[str]) -> str:
    """The line of a command that did a part of what was asked."""
    return one_line_refusal(subprocess.CompletedProcess(done.args, done.returncode, "", done.stderr))


# promise K14: `kip kill -s` sends any signal, by name or number, to the program: a sleeper of each
#   tier is woken for it and handles it; what it does to the program is as by itself; a wrong signal
#   and a stopped proc are one line
@pytest.mark.parametrize("tier", ["hot", "hibernated", "parked"])
def test_kill_sends_a_signal(kip: Kip, tier: str) -> None:
    script = "trap 'echo hup' HUP; trap 'echo usr1; exit 3' USR1; echo begun; while :; do sleep 1000 & wait $!; done"
    proc = kip.run(name := f"told-{tier}", ["bash", "-c", script])
    wait_for("its traps", lambda: "begun" in proc.logs())
    if tier != "hot":
        {"hibernated": proc.hibernate, "parked": proc.sleep}[tier]()
    assert kip.cli("kill", "-s", "HUP", name).stdout == f"{name} got signal 1\n"
    wait_for("the signal", lambda: "hup" in proc.logs())
    woken = [event["detail"] for event in kip.events() if event["kind"] == "woken" and event["name"] == name]
    assert len([detail for detail in woken if detail.startswith("kip kill")]) == (tier != "hot")
    assert tier != "parked" or proc.rebuilt()
    assert "signal \"NOPE\" is not valid" in kip.refused("kill", "-s", "NOPE", name)
    kip.cli("kill", "--signal", "10", name)
    assert proc.wait_state("stopped")["exit"] == "exit code 3"
    assert "stopped" in kip.refused("kill", "-s", "SIGHUP", name)
    assert "usr1" in proc.logs()
