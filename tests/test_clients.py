"""Clients that generators make of the API's document, against a daemon; and a fuzzer of what the document allows."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.kip import ROOT, Kip, daemon
from test_api import free_port

DOCUMENT = ROOT / "docs/api/openapi.json"
PROGRAMS = Path(__file__).parent / "programs" / "clients"
MODULES = ROOT / ".kip" / "npm" / "node_modules"
SLEEPER = ["sleep", "1000"]


@dataclass
class Served:
    """A daemon that serves clients by TCP."""

    kip: Kip
    url: str
    token: str


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    port = free_port()
    with daemon("--listen", f"127.0.0.1:{port}", "--listen-plain") as kip:
        token = kip.json("token", "create", "clients", "--scope", "write")["token"]
        yield Served(kip, f"http://127.0.0.1:{port}", token)


def ran(*command: str | Path, **options: Any) -> str:
    """What a generator prints; it must not fail."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120, check=False, **options)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def tool(name: str) -> Path:
    """A program of the tests' own Python."""
    return Path(sys.executable).parent / name


# promise api: openapi-python-client makes a client of the document that lists, runs, inspects,
#   sleeps, wakes and removes procs, and reads a refusal by its type
def test_openapi_python_client(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.yml").write_text("post_hooks: []\n")
    out = tmp_path / "generated_kip"
    words = ("generate", "--path", DOCUMENT, "--output-path", out, "--meta", "none", "--config", tmp_path / "config.yml")
    said = ran(tool("openapi-python-client"), *words)
    # Streams are lines of JSON or archives, which this generator has no type for; it leaves out
    # nothing else.
    warnings = [line for line in said.splitlines() if line.startswith(("Cannot", "Unable", "Attempted"))]
    assert [line for line in warnings if not re.search("application/x-(ndjson|tar)", line)] == [], said
    monkeypatch.syspath_prepend(tmp_path)

    def part(name: str) -> Any:
        return importlib.import_module(f"generated_kip.{name}")

    def call(name: str, *words: Any, **options: Any) -> Any:
        return part(f"api.procs.{name}").sync(*words, client=client, **options)

    models = part("models")
    client = part("client").AuthenticatedClient(base_url=served.url, token=served.token, timeout=60)
    asked = models.RunRequest(spec=models.Spec(name="python", command=SLEEPER))
    assert call("run_proc", body=asked).state is models.StateName.RUNNING
    assert [proc.name for proc in call("list_procs")] == ["python"]
    assert call("sleep_proc", "python", body=models.SleepRequest(to=models.Tier.PARKED)).tier is models.Tier.PARKED
    assert call("wake_proc", "python").already is False
    seen = call("inspect_proc", "python")
    assert seen.last_wake.from_ is models.Tier.PARKED and seen.spec.command == SLEEPER
    refused = call("run_proc", body=asked)
    assert isinstance(refused, models.Refusal) and refused.code is models.Code.TAKEN
    assert part("api.procs.remove_proc").sync_detailed("python", client=client, force=True).status_code == 204
    assert call("inspect_proc", "python").code is models.Code.UNKNOWN


# promise api: datamodel-code-generator makes types of the document that fit requests, answers and
#   refusals, and that refuse a name or a word that is none
def test_datamodel_codegen(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = ("--input-file-type", "openapi", "--output-model-type", "pydantic_v2.BaseModel", "--formatters", "builtin")
    said = ran(tool("datamodel-codegen"), "--input", DOCUMENT, "--output", tmp_path / "generated_models.py", *kind)
    assert "not understood" not in said, "every format is known"
    monkeypatch.syspath_prepend(tmp_path)
    models = importlib.import_module("generated_models")

    def ask(method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        content = body.model_dump_json(exclude_unset=True).encode() if body is not None else None
        headers = {"authorization": f"Bearer {served.token}"}
        request = urllib.request.Request(served.url + path, content, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as refused:
            return refused.code, refused.read()

    asked = models.RunRequest(spec=models.Spec(name="models", command=SLEEPER))
    status, made = ask("POST", "/v1/procs", asked)
    assert status == 201 and models.ProcView.model_validate_json(made).state is models.StateName.running
    listed = [models.ProcView.model_validate(proc) for proc in json.loads(ask("GET", "/v1/procs")[1])]
    assert [proc.name.root for proc in listed] == ["models"]
    slept = ask("POST", "/v1/procs/models/sleep", models.SleepRequest(to=models.Tier.parked))[1]
    assert models.Moved.model_validate_json(slept).tier is models.Tier.parked
    assert models.Moved.model_validate_json(ask("POST", "/v1/procs/models/wake")[1]).already is False
    seen = models.ProcView.model_validate_json(ask("GET", "/v1/procs/models")[1])
    assert seen.last_wake and seen.last_wake.from_ is models.Tier.parked
    status, refused = ask("POST", "/v1/procs", asked)
    assert status == 409 and models.Refusal.model_validate_json(refused).code is models.Code.taken
    assert ask("DELETE", "/v1/procs/models?force=true")[0] == 204
    for wrong in ({"spec": {"name": "No Name", "command": ["x"]}}, {"spec": {"name": "a", "command": ["x"], "timing": {"clock": "x"}}}):
        with pytest.raises(ValueError, match="validation error"):
            models.RunRequest.model_validate(wrong)


# promise api: openapi-typescript makes types of the document: a client with them passes the
#   compiler and runs, and a word that is none does not pass
def test_openapi_typescript(served: Served, tmp_path: Path) -> None:
    (tmp_path / "node_modules").symlink_to(MODULES)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "smoke.ts").write_text((PROGRAMS / "smoke.ts").read_text())
    (tmp_path / "globals.d.ts").write_text("declare const process: { argv: string[] };\n")
    ran(MODULES / ".bin/openapi-typescript", DOCUMENT, "--output", tmp_path / "api.d.ts", "--default-non-nullable", "false")
    strict = ("--strict", "--noUncheckedIndexedAccess", "--skipLibCheck", "--target", "es2022", "--module", "nodenext", "--lib", "es2022,dom")
    ran(MODULES / ".bin/tsc", *strict, "smoke.ts", "globals.d.ts", cwd=tmp_path)
    assert ran("node", "smoke.js", served.url, served.token, cwd=tmp_path).strip() == "passed"


# Operations that the fuzzer leaves alone: they end the daemon, write files where they are told, or
# answer with frames only.
LEFT_ALONE = ("endDaemon", "backUp", "exportSnapshot", "exportKeys", "execInProc", "attachToProc")
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,lines_conform"


# promise api: a fuzzer of the document (schemathesis) finds no status 500 and no answer outside of
#   its schema
@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_schemathesis(served: Served, tmp_path: Path) -> None:
    served.kip.run("seen", ["sh", "-c", "echo out; sleep 1000"])
    # A request that cannot be carried out may be told in the log as well.
    served.kip.expected = [""]
    left_alone = [word for operation in LEFT_ALONE for word in ("--exclude-operation-id", operation)]
    header = f"Authorization: Bearer {served.token}"
    done = subprocess.run(
        [tool("schemathesis"), "run", DOCUMENT, "--url", served.url, "-H", header, "--checks", CHECKS, *left_alone,
         "--phases", "coverage,fuzzing", "--max-time", "600", "--request-timeout", "60", "--no-color", "--continue-on-failure"],
        cwd=tmp_path, env=os.environ | {"SCHEMATHESIS_HOOKS": str(PROGRAMS / "fuzz.py")}, capture_output=True, text=True, timeout=1700, check=False,
    )  # fmt: skip
    served.kip.remove_all()
    assert done.returncode == 0, done.stdout + done.stderr
    assert served.kip.alive()
