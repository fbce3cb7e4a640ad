"""100 bundles with an engine that only TensorRT could read. A plan is code: none of these may come near a runtime."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

from tests.faults.malformed import bytewise, trees
from tests.faults.malformed.bundle_files import INSPECT, LOAD, MANIFEST, VERIFY, copied
from tests.faults.malformed.kinds import Attempt, Kind, Table, in_turns
from tests.faults.seeds import relisted

PLAN = "engines/tensorrt/model.plan"
PREDICT = ("predict", "given/bundle", "given/image.png", "--target", "tensorrt")
LOAD_PLAN = (*LOAD, "tensorrt")
DEVICE = {
    "gpu": "NVIDIA GeForce RTX 4090",
    "compute_capability": "8.9",
    "tensorrt": "10.16.0",
    "cuda": "12.9",
    "driver": "580.1",
    "versions": "same",
    "hardware": "same",
}
# A plan begins so; what follows is NVIDIA's own.
MAGIC = b"ftrt"
BLOBS = Table()
Change = Callable[[Attempt, Any], bytes]


def case(name: str, *, must_refuse: bool = False, words: tuple[str, ...] = ()) -> Callable[[Change], Change]:
    """A class of plans: (attempt, the engine's entry, to be changed in place) -> the bytes."""

    def added(change: Change) -> Change:
        @BLOBS.add(name, must_refuse=must_refuse)
        def make(attempt: Attempt) -> None:
            with_plan(attempt, change)
            attempt.words = words or attempt.words

        return change

    return added


def with_plan(attempt: Attempt, change: Change) -> None:
    """A bundle whose first engine is a plan, rightly listed."""
    folder, document = copied(attempt)
    engine = copy.deepcopy(document["engines"][0])
    engine.update(target="tensorrt", files=[PLAN], options={}, device=dict(DEVICE), provider="TensorRT 10.16", batch=1)
    data = change(attempt, engine)
    attempt.write(f"bundle/{PLAN}", data)
    document["engines"].insert(0, engine)
    document["files"].append({"path": PLAN, "bytes": 0, "sha256": ""})
    (folder / MANIFEST).write_text(json.dumps(document), encoding="utf-8")
    relisted(folder)


def _plan(chance: random.Random, size: int = 4096) -> bytes:
    return MAGIC + chance.randbytes(size)


case("a plan of somebody else's", must_refuse=True, words=PREDICT)(lambda attempt, engine: _plan(attempt.random))
case("a plan of somebody else's, by Python", must_refuse=True, words=LOAD_PLAN)(
    lambda attempt, engine: _plan(attempt.random)
)
case("random bytes")(lambda attempt, engine: attempt.random.randbytes(2000))
case("an empty plan")(lambda attempt, engine: b"")
case("another file")(lambda attempt, engine: bytewise.another_file(attempt.random, b""))
case("a large plan")(lambda attempt, engine: MAGIC + bytes(attempt.random.choice((1 << 20, 64 << 20))))


@case("a program", must_refuse=True, words=PREDICT)
def _program(attempt, engine):
    """A shared library would run something when it is loaded; a script when it is started."""
    script = f"#!/bin/sh\ntouch '{attempt.mark}'\n".encode()
    return attempt.random.choice((script, b"\x7fELF\x02\x01\x01" + bytes(57) + script))


@case("a pickle that runs something", must_refuse=True, words=PREDICT)
def _pickle(attempt, engine):
    return b"\x80\x04cposix\nsystem\n(" + f"V touch '{attempt.mark}'\n".encode() + b"tR."


@case("facts of a device that lie")
def _device(attempt, engine):
    engine["device"] = trees.changed(attempt.random, DEVICE, times=3)
    return _plan(attempt.random)


@case("no facts of a device, or very many")
def _no_device(attempt, engine):
    engine["device"] = attempt.random.choice(({}, {f"k{i}": "v" for i in range(20_000)}, {"versions": "newer"}))
    return _plan(attempt.random)


@case("an entry of the engine changed")
def _entry(attempt, engine):
    other = trees.changed(attempt.random, engine, times=2)
    engine.clear()
    engine.update(other)
    return _plan(attempt.random)


@case("the plan of another target")
def _target(attempt, engine):
    engine["target"] = attempt.random.choice(
        ("onnxruntime-cpu", "openvino-cpu", "onnxruntime-cuda", "tensorrt-rtx", "none")
    )
    attempt.words = (*LOAD, engine["target"])
    return _plan(attempt.random)


@case("a plan as an engine of OpenVINO", must_refuse=True, words=(*PREDICT[:-1], "openvino-cpu-int8"))
def _as_openvino(attempt, engine):
    engine.update(target="openvino-cpu", precision="int8")
    return _plan(attempt.random)


@case("a plan as an engine of ONNX Runtime", must_refuse=True, words=(*PREDICT[:-1], "onnxruntime-cpu-int8"))
def _as_onnxruntime(attempt, engine):
    engine.update(target="onnxruntime-cpu", precision="int8")
    return attempt.random.choice((_plan(attempt.random), b"ORTM" + attempt.random.randbytes(2000)))


@BLOBS.add("a plan that is not the listed one", must_refuse=True)
def _unlisted(attempt: Attempt) -> None:
    with_plan(attempt, lambda attempt, engine: _plan(attempt.random))
    path = attempt.given / "bundle" / PLAN
    path.write_bytes(bytewise.one_bit(attempt.random, path.read_bytes()))
    attempt.words = attempt.random.choice((INSPECT, VERIFY, PREDICT))


@BLOBS.add("a graph for an execution provider, which names its own files", must_refuse=True)
def _context(attempt: Attempt) -> None:
    """ONNX Runtime's EPContext: a node that says which file a provider loads."""
    import onnx
    from onnx import helper

    folder, document = copied(attempt)
    engine = document["engines"][0]
    proto = onnx.load(str(folder / engine["graph"]))
    made = helper.make_node(
        "EPContext",
        ["image"],
        ["logits"],
        domain="com.microsoft",
        main_context=1,
        embed_mode=attempt.random.choice((0, 1)),
        ep_cache_context=attempt.random.choice(("../../../image.png", "/etc/passwd", "x")),
        source="TensorrtExecutionProvider",
    )
    del proto.graph.node[:]
    proto.graph.node.append(made)
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    (folder / engine["files"][0]).write_bytes(proto.SerializeToString())
    relisted(folder)
    attempt.words = (*PREDICT[:-1], "onnxruntime-cpu")


def whole(attempt: Attempt) -> None:
    with_plan(attempt, lambda attempt, engine: _plan(attempt.random))


KIND = Kind(
    "engine blobs",
    full=100,
    damages=tuple(BLOBS),
    words=in_turns(INSPECT, VERIFY, PREDICT, LOAD),
    whole=whole,
    commands=(INSPECT, VERIFY, LOAD),
)
