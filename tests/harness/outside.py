"""Another machine beside this one: a network namespace behind a link of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Outside:
    """Another machine: what commands that run there begin with, this machine's addresses as seen from there, its own, and a second one of its own."""

    inside: list[str]
    here4: str
    here6: str
    there4: str
    there6: str
    also4: str


@contextmanager
def outside() -> Iterator[Outside]:
    """Each has a network of its own, for others may test on this machine."""

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)

    # The kernel makes one namespace of a name.
    for number in range(32):
        name, link = f"kip-test-out-{number}", f"kpt{number}"
        if subprocess.run(["ip", "netns", "add", name], capture_output=True, timeout=10).returncode == 0:
            break
    else:
        raise AssertionError("32 such machines are there already (ip netns)")
    net4, net6 = number * 8, f"2001:db8:5:{number + 1:x}"
    here4, there4, also4 = (f"198.51.100.{net4 + host}" for host in (1, 2, 3))
    here6, there6 = f"{net6}::1", f"{net6}::2"

    try:
        ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("addr", "add", f"{here4}/29", "dev", link)
        ip("addr", "add", f"{here6}/64", "dev", link, "nodad")
        ip("link", "set", link, "up")
        for address in (there4, also4):
            ip("-n", name, "addr", "add", f"{address}/29", "dev", "eth0")
        ip("-n", name, "addr", "add", f"{there6}/64", "dev", "eth0", "nodad")
        ip("-n", name, "link", "set", "eth0", "up")
        ip("-n", name, "route", "add", "default", "via", here4)
        ip("-n", name, "route", "add", "default", "via", here6)
        # As an uplink has it. Before kernel 6.17 IPv6 is forwarded by all interfaces or none, which
        # is up to Kip.
        for setting in ("ipv4/conf/{}/forwarding", "ipv6/conf/{}/force_forwarding"):
            path = Path("/proc/sys/net", setting.format(link))
            if path.exists():
                path.write_text("1")
        yield Outside(["ip", "netns", "exec", name], here4, here6, there4, there6, also4)
    finally:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=10)
        subprocess.run(["ip", "link", "delete", link], capture_output=True, timeout=10)
