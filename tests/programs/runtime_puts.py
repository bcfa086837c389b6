"""Makes one file after the other in the name tree, each once, and prints what became of each."""

import itertools

import kip

client = kip.Client()
client.mkdir("/n")
for number in itertools.count(1):
    try:
        client.put(f"/n/{number}", b"", new=True)
        print(number, "done", flush=True)
    except kip.OutcomeUnknown:
        print(number, "unknown", flush=True)
    except kip.KipError as error:
        print(number, type(error).__name__, error, flush=True)
