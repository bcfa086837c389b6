"""Hooks of schemathesis: half of the requests name a proc that is there and run a program that is, and no request follows a stream for
as long as there is one. Each line of a stream is checked against its schema."""

import json
import random

import jsonschema
import schemathesis

RUNS = ("runProc", "validateRun", "compareRun")


@schemathesis.check
def lines_conform(_context, response, case):
    """A line that is not of its schema fails; the last one may be a refusal."""
    document = case.operation.schema.raw_schema
    media = document["paths"][case.path].get(case.method.lower(), {}).get("responses", {}).get(str(response.status_code), {}).get("content", {})
    if "application/x-ndjson" not in media:
        return
    schema = media["application/x-ndjson"]["schema"] | {"components": document["components"]}
    *values, last = [json.loads(line) for line in response.content.splitlines()] or [None]
    if last is not None and "refusal" not in last:
        values.append(last)
    for value in values[:100]:
        jsonschema.validate(value, schema, jsonschema.Draft202012Validator)


@schemathesis.hook
def before_call(_context, case, _kwargs):
    """Each case is changed just before it is sent."""
    if isinstance(case.query, dict):
        case.query.pop("follow", None)
    if random.random() < 0.5:
        return
    if isinstance(case.path_parameters, dict) and "/procs/" in case.path:
        case.path_parameters["name"] = "seen"
    spec = case.body.get("spec") if isinstance(case.body, dict) else None
    if case.operation.definition.raw.get("operationId") in RUNS and isinstance(spec, dict):
        spec["command"] = ["sleep", "1000"]
        spec.pop("image", None)
