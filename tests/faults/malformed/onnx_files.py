"""800 ONNX files: damage to the wire format (`onnx_wire`) and to the graph (`onnx_graphs`), in turns."""

from __future__ import annotations

from tests.faults.malformed.kinds import Attempt, Kind, in_turns
from tests.faults.malformed.onnx_graphs import GRAPHS
from tests.faults.malformed.onnx_wire import WIRE

FILE = "given/model.onnx"
INSPECT = ("inspect", FILE)
OPTIMIZE = ("optimize", FILE, "-o", "out")
EXPORT = ("export", FILE, "-o", "out")


def whole(attempt: Attempt) -> None:
    attempt.write("model.onnx", attempt.seeds.graph.read_bytes())


KIND = Kind(
    "ONNX",
    full=800,
    damages=(*WIRE, *GRAPHS),
    words=in_turns(INSPECT, OPTIMIZE, INSPECT, OPTIMIZE, EXPORT, INSPECT, OPTIMIZE),
    whole=whole,
    commands=(INSPECT, OPTIMIZE, EXPORT),
)
