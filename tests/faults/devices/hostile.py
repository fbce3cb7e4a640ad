"""A device's Python that does what a case asks for, instead of what it is told.

    python -IS hostile.py FOLDER -c CODE DIGEST VERB ...

FOLDER/case.json says which verb misbehaves, how, and the first how many times; all others are done by stand-ins, or by
the real agent (`real`). Standard library alone, and little of it: this starts at every call.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

READY = b"vitdeploy-agent ok\n"
BEAT = b'{"alive": true}\n'
FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
OFTEN = 0.2  # seconds
ABSENT, QUEUED, RUNNING, DONE = ({"state": state} for state in ("absent", "queued", "running", "done"))
FAILED = {"failure": {"artifact": "", "code": "VD4201", "message": "a stand-in has no engine"}}
STAND_INS = {"status": ABSENT, "submit": QUEUED, "watch": DONE, "remove": ABSENT, "stop": {"state": "stopped"}}
STAND_INS |= {"deployed": {"deployed": []}, "missing": {"missing": []}}


def say(block):
    os.write(1, block)


def line(document):
    return json.dumps(document).encode() + b"\n"


def read_all():
    """Read what is sent, beside all else."""

    def drain():
        while os.read(0, 65536):
            pass

    threading.Thread(target=drain, daemon=True).start()


def mute(verb):
    time.sleep(3600)


def hang(verb):
    """Without reading what is sent."""
    time.sleep(3600)


def endlessly(block, seconds=0.0, descriptor=1):
    while True:
        os.write(descriptor, block)
        time.sleep(seconds)


def shut():
    """Close everything, and live on."""
    for descriptor in (1, 2):
        os.close(descriptor)
    time.sleep(3600)


def queue(verb):
    for number in range(10**9):
        whom = f"bench of somebody{number}@else"
        say(line({"waits_for": whom} if verb == "serve" else {**QUEUED, "detail": whom}))
        time.sleep(OFTEN)


def run(verb):
    for number in range(10**9):
        progress = ["measure", number, 10**9]
        say(line({"begun": True} if verb == "serve" else {**RUNNING, "progress": progress}))
        time.sleep(OFTEN)


# By name: whether the agent has greeted before, and what it does then.
ACTS = {
    "mute": (False, mute),
    "drips its greeting": (False, lambda verb: endlessly(b"v", OFTEN)),
    "noise": (False, lambda verb: endlessly(b"Welcome!\n" * 1000)),
    "greets and hangs": (True, hang),
    "drips": (True, lambda verb: endlessly(b"[", OFTEN)),
    "floods errors": (True, lambda verb: endlessly(b"warning " * 8192, descriptor=2)),
    "endless line": (True, lambda verb: endlessly(b"[" * 65536)),
    "beats for ever": (True, lambda verb: endlessly(BEAT, OFTEN)),
    "flood of beats": (True, lambda verb: endlessly(BEAT * 4096)),
    "shuts its output": (True, lambda verb: shut()),
    "queues for ever": (True, queue),
    "runs for ever": (True, run),
    "ends": (True, lambda verb: sys.exit(0)),
}


def relay(case, words):
    """The real agent, until it has said so many lines and bytes more, or heard so many bytes; then it is gone."""
    heard, lines, more = case.get("heard"), case.get("lines", 0), case.get("bytes", 0)
    source = subprocess.PIPE if heard is not None else None
    child = subprocess.Popen([case["python"], *words], stdin=source, stdout=subprocess.PIPE)
    if heard is not None:
        say(child.stdout.readline())
        with contextlib.suppress(BrokenPipeError):
            while heard and (block := os.read(0, min(heard, 65536))):
                child.stdin.write(block)
                heard -= len(block)
            child.stdin.flush()
    else:
        while lines:
            found = child.stdout.readline()
            say(found)
            lines -= found != BEAT
        with contextlib.suppress(BrokenPipeError):
            while more and (block := child.stdout.read(min(more, 65536))):
                say(block)
                more -= len(block)
    child.kill()
    child.wait()


def misbehave(case, verb, words):
    if "largest" in case:  # as a full disk: no file can be larger
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (case["largest"], case["largest"]))
        os.execv(case["python"], [case["python"], *words])  # noqa: S606
    if "answer" in case:
        read_all()
        say(READY + (FOLDER / "answer").read_bytes())
        return 0
    if "say" in case:
        say(READY + bytes.fromhex(case["say"]))
        if case.get("then") != "endless":
            return 0
        endlessly(b"\0" * 65536)
    if "act" not in case or case.get("lines"):
        relay(case, words)
    if "act" not in case:
        return 255  # as ssh says that the connection broke
    greets, act = ACTS[case["act"]]
    if greets and not case.get("lines"):
        say(READY)
    if act is not hang:
        read_all()
    act(verb)
    return 0


def stand_in(case, verb):
    if verb == "probe" and case["verb"] == "install":
        say(b"vitdeploy-agent missing 3.12.1\n")
        return 0
    if verb == "install":
        sys.stdin.buffer.read()
        say(READY)
        return 0
    say(READY)
    if verb in ("submit", "missing"):
        sys.stdin.buffer.read1()
    say(line(STAND_INS.get(verb, FAILED)))
    return 0


def main():
    words = sys.argv[2:]
    case, verb = json.loads((FOLDER / "case.json").read_text()), (words[3:] or ["install"])[0]
    if verb == case["verb"]:
        calls = FOLDER / "calls"
        with calls.open("ab") as file:
            file.write(b".")
        if calls.stat().st_size <= case.get("times", 10**9):
            return misbehave(case, verb, words)
    if case.get("real"):
        os.execv(case["python"], [case["python"], *words])  # noqa: S606
    return stand_in(case, verb)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        sys.exit(main())
