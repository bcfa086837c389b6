"""Traces: each wake is a trace at a real OTLP collector's door, with a span for each step. The collector is the test's own: it
reads protocol buffers by the field numbers of opentelemetry-proto (trace.proto, common.proto)."""

from __future__ import annotations

import http.server
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from harness import servers, logged
from harness.clients import http_get
from harness.kip import Kip
from harness.wait import wait_for


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field: numbers, 8 bytes as a number, or bytes."""

    def varint(at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            byte = data[at]
            value |= (byte & 127) << shift
            at, shift = at + 1, shift + 7
            if byte < 128:
                return value, at

    at = 0
    while at < len(data):
        key, at = varint(at)
        if key & 7 == 0:
            value, at = varint(at)
        elif key & 7 == 1:
            value, at = int.from_bytes(data[at : at + 8], "little"), at + 8
        elif key & 7 == 5:
            value, at = int.from_bytes(data[at : at + 4], "little"), at + 4
        else:
            assert key & 7 == 2, key
            length, at = varint(at)
            value, at = data[at : at + length], at + length
        yield key >> 3, value


def attributes(data: list[bytes]) -> dict[str, str]:
    """KeyValue: key 1, value 2; AnyValue: string 1."""
    pairs = [dict(fields(one)) for one in data]
    return {pair[1].decode(): dict(fields(pair[2])).get(1, b"").decode() for pair in pairs if 2 in pair}


def spans(body: bytes) -> Iterator[dict[str, Any]]:
    for _, resource_spans in fields(body):
        both = list(fields(resource_spans))
        resource = [v for k, v in fields(next(v for k, v in both if k == 1)) if k == 1]
        for scope in (v for k, v in both if k == 2):
            for span in (dict_of(v) for k, v in fields(scope) if k == 2):
                status = dict(fields(span[15][0])) if 15 in span else {}
                yield {
                    "trace": span[1][0], "id": span[2][0], "parent": span.get(4, [b""])[0], "name": span[5][0].decode(),
                    "begin": span[7][0], "end": span[8][0], "attributes": attributes(span.get(9, [])),
                    "resource": attributes(resource), "error": status.get(2, b"").decode() if status.get(3) == 2 else None,
                }  # fmt: skip


def dict_of(data: bytes) -> dict[int, list[Any]]:
    all_of: dict[int, list[Any]] = {}
    for number, value in fields(data):
        all_of.setdefault(number, []).append(value)
    return all_of


class Collector(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.paths: list[str] = []
        self.spans: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def trace(self, **attributes_of_it: str) -> list[dict[str, Any]] | None:
        """The first whole trace of a wake with such attributes: its root, then its steps by time."""
        wanted = {f"kip.{key}": value for key, value in attributes_of_it.items()}
        for root in (s for s in list(self.spans) if not s["parent"] and wanted.items() <= s["attributes"].items()):
            steps = [s for s in self.spans if s["trace"] == root["trace"] and s["parent"] == root["id"]]
            return [root, *sorted(steps, key=lambda s: (s["begin"], s["end"]))]
        return None


class Handler(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.paths.append(f"{self.path} {self.headers['Content-Type']} {self.headers.get('X-Team')}")
        self.server.spans += spans(body)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    thread = threading.Thread(target=collector.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        collector.shutdown()
        thread.join()
        collector.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as one:
        yield one


# promise meters: each wake is a trace by OTLP over HTTP: root with proc, tier and trigger, a span
#   for each step, times those of `kip inspect`; the last ones are sent when the daemon ends
def test_every_wake_is_a_trace(collector: Collector, fresh_kip: Callable[..., Kip], tmp_path: Path) -> None:
    """By connection and by request, from both tiers; durations and steps are those that `inspect` shows; the last ones are sent when
    the daemon ends."""
    kip = fresh_kip("--traces", collector.url)
    server = servers.lighttpd()
    web = kip.run("web", server.command, ports=server.published, tar=server.tarball(tmp_path))
    web.hibernate()
    web.wake()
    web.sleep()
    assert http_get(web.port(), "/page.html") == servers.PAGE
    wake = web.inspect()["last_wake"]
    trace = wait_for("the trace arrives", lambda: collector.trace(proc="web", tier="parked"), 20)
    root, steps = trace[0], trace[1:]
    assert root["name"] == "wake" and root["attributes"]["kip.trigger"] == wake["trigger"] and "connection" in wake["trigger"]
    assert [step["name"] for step in steps] == [step["name"] for step in wake["steps"]]
    assert [(step["end"] - step["begin"]) // 1000 for step in steps] == [step["us"] for step in wake["steps"]]
    assert (root["end"] - root["begin"]) // 1000 == wake["total_us"] and root["error"] is None
    assert root["begin"] <= steps[0]["begin"] and abs(root["end"] // 10**6 - wake["at_ms"]) < 1000
    assert root["resource"]["service.name"] == "kip" and root["resource"]["kip.data"] == str(kip.data)
    other = wait_for("the first one", lambda: collector.trace(proc="web", tier="hibernated"), 20)
    assert other[0]["attributes"]["kip.trigger"] == "kip wake" and other[0]["trace"] != root["trace"]
    assert all(path.startswith("/v1/traces application/x-protobuf") for path in collector.paths)
    web.sleep()
    web.wake()
    kip.down()
    wakes = [s for s in collector.spans if s["name"] == "wake" and s["attributes"].get("kip.trigger") == "kip wake"]
    assert len(wakes) >= 2, "the last wake is not lost with the daemon"


# promise meters: OpenTelemetry's own variables say where to, with which headers, under which name;
#   a wake that fails is a span with its error
def test_by_variables_and_a_wake_that_fails(
    collector: Collector, fresh_kip: Callable[..., Kip], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As other programs are told by OpenTelemetry's variables, headers and the service's name too."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=blue")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "sleepers")
    kip = fresh_kip()
    proc = kip.run("one", ["sleep", "1000"])
    proc.sleep()
    part = next(path for path in sorted((kip.data / "procs/one").glob("gen-*/checkpoint.tar")))
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    kip.expected += [logged.SNAPSHOT_UNUSABLE, logged.NOT_NATIVE]
    said = kip.refused("wake", "one")
    root = wait_for("the trace arrives", lambda: collector.trace(proc="one"), 20)[0]
    assert root["error"] and root["error"] in said and root["resource"]["service.name"] == "sleepers"
    assert collector.paths[0].endswith("blue")


# promise meters: a collector that is gone delays no wake and no end; one line when spans are lost,
#   one when they arrive again
def test_a_collector_that_is_gone_costs_nobody_anything(fresh_kip: Callable[..., Kip]) -> None:
    """Wakes go on, one line says what is lost, another that it is over; the daemon ends without waiting for it."""
    with collecting() as collector:
        url = collector.url
    port = int(url.rsplit(":", 1)[1])
    kip = fresh_kip("--traces", url)
    kip.expected += [r"traces are lost until the collector takes them again"]
    proc = kip.run("one", ["sleep", "1000"])

    def round_trip() -> None:
        proc.sleep()
        proc.wake()

    def says(text: str) -> int:
        return kip.stderr().count(text)

    round_trip()
    wait_for("one line", lambda: says("traces are lost"), 20)
    round_trip()
    round_trip()
    collector = Collector.__new__(Collector)
    http.server.ThreadingHTTPServer.__init__(collector, ("127.0.0.1", port), Handler)
    collector.paths, collector.spans = [], []
    thread = threading.Thread(target=collector.serve_forever)
    thread.start()
    try:
        wait_for("it is over", lambda: (round_trip(), says("traces arrive again"))[1], 40, every=0.5)
    finally:
        collector.shutdown()
        thread.join()
        collector.server_close()
    assert says("traces are lost") == 1 and collector.trace(proc="one")


# promise meters: an endpoint that is no URL is refused
# held by: this, `kip_daemon::traces::tests::an_endpoint_is_a_url_with_or_without_a_path`
def test_what_is_no_collector_is_refused(fresh_kip: Callable[..., Kip]) -> None:
    kip = fresh_kip(start=False)
    assert "http://HOST:PORT" in kip.refused("up", "--traces", "127.0.0.1:4318")
    assert os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") is None
