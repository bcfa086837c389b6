"""Names of procs in DNS inside: at 127.0.0.11, for what reads no /etc/hosts, nginx's `resolver` for one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from harness import images, servers
from harness.clients import http_get
from harness.kip import Kip, Proc

COMPOSE = """\
name: shop
services:
  front:
    image: "front:1"
    ports: ["8080"]
    x-kip: {idle: 1h}
  store:
    image: "web:1"
    container_name: store
    x-kip: {idle: 1h}
"""
PAGE = b"first\n"


def front() -> images.Image:
    """nginx, which asks its resolver for each request."""
    conf = servers.NGINX_CONF.replace("root /srv/www;", "resolver 127.0.0.11 valid=1s;\n        set $store STORE;")
    conf = conf.replace('location = /worker { return 200 "$pid\\n"; }', "location / { proxy_pass http://$store:8080; }")
    assert "proxy_pass" in conf and "resolver" in conf
    files = [images.entry(name) for name in ("etc", "etc/nginx", "var", "var/lib", "var/lib/nginx", "var/log", "var/log/nginx", "run", "tmp")]
    files += [images.entry("etc/nginx/kip.conf", conf.replace("user www-data;", "user root;"), mode=0o644)]
    files += [images.entry("etc/passwd", "root:x:0:0::/:/bin/sh\n", mode=0o644), images.entry("etc/group", "root:x:0:\n", mode=0o644)]
    config = {"Entrypoint": ["/usr/sbin/nginx", "-c", "/etc/nginx/kip.conf"], "ExposedPorts": {"8080/tcp": {}}}
    return images.Image([images.with_libraries("/usr/sbin/nginx"), images.tools(), images.archive(files)], config)


def dig(proc: Proc, *words: str, tries: int = 1) -> list[str]:
    """Lines of an answer inside, by UDP and by TCP the same."""
    pid = proc.inspect()["pids"][0]
    command = ["nsenter", f"--net=/proc/{pid}/ns/net", "dig", "@127.0.0.11", f"+tries={tries}", f"+timeout={30 // tries}", *words]
    by_udp, by_tcp = (subprocess.run([*command, *more], capture_output=True, text=True, timeout=60) for more in ([], ["+tcp"]))
    # Tries without an answer are comments, as other lines are which are kept.
    lost = ";; communications error"
    answered = [[line for line in done.stdout.splitlines() if not line.startswith(lost)] for done in (by_udp, by_tcp)]
    assert answered[0][:1] == answered[1][:1], (by_udp, by_tcp)
    return answered[0]


def loaded(kip: Kip, tmp_path: Path, text: str, **layouts: images.Image) -> Path:
    for name, image in layouts.items():
        kip.cli("image", "load", f"oci:{images.layout(tmp_path / name, one=image)}:one", "--name", f"{name}:1")
    file = tmp_path / "compose.yaml"
    file.write_text(text)
    kip.cli("apply", "-f", file)
    return file


# promise files: they find each other in DNS too, at 127.0.0.11 inside, asleep and while no daemon
#   ran; other questions go to the machine's name servers; a proc with a port 53 has that for itself
# held by: this, `tests/test_dns.py::test_a_program_has_port_53_for_itself`,
#   `kip_dns::tests::names_of_the_network_are_answered_and_no_others`,
#   `kip_dns::tests::other_questions_go_to_the_next_server_that_answers`,
#   `kip_dns::tests::only_single_questions_go_to_others`,
#   `kip_dns::tests::name_servers_are_read`
def test_names_are_in_dns_through_sleeps_and_daemons(fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    kip = fresh_kip()
    kip.expected.append(r"(WARN|ERROR).*(adopt|keeper|pager|gone|died)")
    loaded(kip, tmp_path, COMPOSE, front=front(), web=images.web())
    front_, store = Proc(kip, "shop-front"), Proc(kip, "store")
    addresses = [line.split("\t")[0] for line in front_.exec("cat", "/etc/hosts").stdout.splitlines() if "store" in line]
    assert len(addresses) == 2

    def known() -> bool:
        return [dig(front_, "+short", "Store", kind) for kind in ("A", "AAAA")] == [[addresses[0]], [addresses[1]]]

    assert known() and dig(front_, "+short", "store", "MX") == []
    assert front_.exec("cat", "/etc/resolv.conf").stdout.splitlines()[1] == "nameserver 127.0.0.11"
    # What is no proc's is for the machine's name servers, which know no such name, or do not answer
    # here.
    assert any(f"status: {status}" in line for status in ("SERVFAIL", "NXDOMAIN") for line in dig(front_, "none.invalid"))
    for _ in range(2):
        assert http_get(front_.port(8080), "/") == PAGE
        store.sleep()
        assert known() and store.state == "parked", "a question wakes nothing"
        front_.sleep()
    kip.kill()
    kip.up()
    assert http_get(front_.port(8080), "/") == PAGE
    assert known()
    store.remove()
    assert any("SERVFAIL" in line or "NXDOMAIN" in line for line in dig(front_, "store"))


# Asks for a name of its own network as fast as it can, by UDP.
FLOOD = """
import socket, time
asked = b"\\0\\7\\1\\0\\0\\1" + bytes(6) + b"\\5store\\0\\0\\1\\0\\1"
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.connect(("127.0.0.11", 53))
until = time.monotonic() + 5
while time.monotonic() < until:
    s.send(asked)
"""


# promise files: a flood of questions to its resolver is answered 1,000 times a second, and costs
#   the daemon little
# held by: this, `kip_dns::tests::a_flood_of_questions_is_answered_slowly`
def test_a_flood_of_questions_costs_the_daemon_little(kip: Kip, tmp_path: Path) -> None:
    loaded(kip, tmp_path, COMPOSE, front=front(), web=images.web())
    front_ = Proc(kip, "shop-front")
    assert kip.daemon
    stat = Path(f"/proc/{kip.daemon.pid}/stat")

    def cpu_s() -> float:
        fields = stat.read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    before = cpu_s()
    pid = front_.inspect()["pids"][0]
    subprocess.run(["nsenter", f"--net=/proc/{pid}/ns/net", sys.executable, "-c", FLOOD], check=True, timeout=60)
    assert cpu_s() - before < 1.5, "less than a third of the 5 s"
    # What the flood has left in the resolver's queue may have no room for a question: a client asks
    # again after 5 s.
    assert dig(front_, "+short", "store", tries=3) != []
    front_.remove()
    Proc(kip, "store").remove()


def test_a_program_has_port_53_for_itself(kip: Kip, tmp_path: Path) -> None:
    """It binds every address: a resolver of Kip's would be in its way."""
    config = {"Entrypoint": ["/bin/busybox", "nc", "-ll", "-p", "53", "-e", "/bin/cat"], "ExposedPorts": {"53/tcp": {}}}
    text = 'name: own\nservices:\n  names:\n    image: "names:1"\n    ports: ["53"]\n    x-kip: {idle: 1h}\n'
    loaded(kip, tmp_path, text, names=images.Image([images.tools()], config))
    names = Proc(kip, "own-names")
    assert "127.0.0.11" not in names.exec("cat", "/etc/resolv.conf", check=False).stdout
    names.sleep()
    names.wake()
