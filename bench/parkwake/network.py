"""Network namespaces for servers that do not run under Kip, and for runc's the same kind of kernel NAT as Kip's."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from parkwake.janitor import inside
from parkwake.workspace import Failed, Workspace, command


class Network:
    """A network namespace: with a veth to the host, or, for servers without any sandbox, with its loopback only."""

    def __init__(self, work: Workspace, number: int, veth: bool):
        assert number < 60, "the addresses of a run end there"
        self.name, self.number = f"{work.prefix}-{number}", number
        self.path = Path("/run/netns") / self.name
        self.link = f"{self.name}h"
        third = os.getpid() % 250
        self.gateway, self.address = f"10.212.{third}.{4 * number + 1}", f"10.212.{third}.{4 * number + 2}"
        command("ip", "netns", "add", self.name)
        command("ip", "-n", self.name, "link", "set", "lo", "up")
        if not veth:
            self.address = "127.0.0.1"
            return
        command("ip", "link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        command("ip", "addr", "add", f"{self.gateway}/30", "dev", self.link)
        command("ip", "link", "set", self.link, "up")
        command("ip", "-n", self.name, "addr", "add", f"{self.address}/30", "dev", "eth0")
        command("ip", "-n", self.name, "link", "set", "eth0", "up")
        command("ip", "-n", self.name, "route", "add", "default", "via", self.gateway)

    def end_servers(self, but: tuple[int, ...] = (), timeout: float = 10) -> None:
        """SIGKILL for every process in it."""
        deadline = time.monotonic() + timeout
        while left := [pid for pid in inside(self.path) if pid not in but]:
            if time.monotonic() > deadline:
                raise Failed(f"processes {left} in {self.name} will not end")
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            time.sleep(0.002)


class Nat:
    """Host ports for addresses in namespaces: destination NAT by maps, as Kip publishes them, 127.0.0.1 included."""

    def __init__(self, work: Workspace):
        self.table = work.prefix
        rules = f"""table inet {self.table} {{
  map tcp4 {{ type inet_service : ipv4_addr . inet_service; }}
  map udp4 {{ type inet_service : ipv4_addr . inet_service; }}
  chain guard {{
    type filter hook prerouting priority raw; policy accept;
    iifname != "{work.prefix}-*" accept
    ip daddr 127.0.0.0/8 drop
    fib saddr . iif oif missing counter drop
  }}
  chain local {{
    type nat hook output priority -100; policy accept;
    fib daddr type != local accept
    dnat ip to tcp dport map @tcp4
    dnat ip to udp dport map @udp4
  }}
  chain leaving {{
    type nat hook postrouting priority srcnat; policy accept;
  }}
  chain host {{
    type filter hook input priority filter; policy accept;
    iifname != "{work.prefix}-*" accept
    ct state established,related accept
    ct state invalid drop
    drop
  }}
}}
"""
        command("nft", "-f", "-", input=rules)

    def publish(self, network: Network, proto: str, host_port: int, port: int) -> None:
        """From now on 127.0.0.1:host_port leads there."""
        Path(f"/proc/sys/net/ipv4/conf/{network.link}/route_localnet").write_text("1")
        element = f"{{ {host_port} : {network.address} . {port} }}"
        command("nft", "add", "element", "inet", self.table, f"{proto}4", element)
        rule = ["oifname", network.link, "ip", "saddr", "127.0.0.0/8", "snat", "ip", "to", network.gateway]
        command("nft", "add", "rule", "inet", self.table, "leaving", *rule)
