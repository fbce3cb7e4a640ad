"""The targets, and one table per layer of what a back end does there.

A target is a back end on a kind of device. What a layer asks of a back end is a row of that layer's own table: a frozen
dataclass of functions, which stands in the back end's own file and is imported at first use. `runtime`, `compilation`,
`benchmark` and `quantization` each have a table in their `backend.py`.

A package from outside adds a back end by entry points: its targets in the group `vitdeploy.targets` (by target name, a
`Target` each), and its rows in `vitdeploy.runtime`, `vitdeploy.compilation`, `vitdeploy.benchmark` and
`vitdeploy.quantization` (by the name of the back end).
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from vitdeploy.errors import TargetError
from vitdeploy.extensions import RowTable, entry_points_of, load_row, row_at
from vitdeploy.spec import Precision


@dataclass(frozen=True)
class Target:
    """One row of the capability table: a back end on a device.

    `module` is the Python module of the runtime, `package` what pip calls it, `extra` the extra of vitdeploy that
    installs it ("" where it is none of ours). `typed`: half precision stands in the graph, where other targets have it
    as a setting of the runtime.
    """

    name: str
    backend: str
    device: str
    extra: str
    package: str
    module: str
    precisions: tuple[Precision, ...]
    typed: bool = False


_BUILT_IN = {
    target.name: target
    for target in (
        Target(
            name="onnxruntime-cpu",
            backend="onnxruntime",
            device="CPU",
            extra="onnxruntime",
            package="onnxruntime",
            module="onnxruntime",
            precisions=("fp32", "int8", "mixed", "int4"),
        ),
        Target(
            name="openvino-cpu",
            backend="openvino",
            device="CPU",
            extra="openvino",
            package="openvino",
            module="openvino",
            # Half precision is a runtime hint; whether this CPU has it is asked of the runtime when compiling.
            precisions=("fp32", "fp16", "bf16", "int8", "mixed", "int4"),
        ),
        Target(
            name="openvino-gpu",
            backend="openvino-device",
            device="Intel GPU",
            extra="openvino",
            package="openvino",
            module="openvino",
            precisions=("fp32", "fp16", "int8"),
            typed=True,
        ),
        Target(
            name="openvino-npu",
            backend="openvino-device",
            device="Intel NPU",
            extra="openvino",
            package="openvino",
            module="openvino",
            precisions=("fp16", "int8"),
            typed=True,
        ),
        Target(
            name="openvino-auto",
            backend="openvino-device",
            device="AUTO device",
            extra="openvino",
            package="openvino",
            module="openvino",
            precisions=("fp32", "fp16", "int8"),
            typed=True,
        ),
        Target(
            name="tensorrt",
            backend="tensorrt",
            device="GPU",
            extra="tensorrt",
            package="tensorrt",
            module="tensorrt",
            precisions=("fp32", "fp16", "bf16", "fp8", "int8"),  # the last two have the rest of the graph in FP16
            typed=True,
        ),
        Target(
            name="onnxruntime-cuda",
            backend="onnxruntime-gpu",
            device="GPU",
            extra="cuda",
            package="onnxruntime-gpu",
            module="onnxruntime",
            precisions=("fp32", "fp16", "bf16"),
            typed=True,
        ),
        Target(
            name="onnxruntime-tensorrt",
            backend="onnxruntime-gpu",
            device="GPU",
            extra="cuda",
            package="onnxruntime-gpu",
            module="onnxruntime",
            precisions=("fp32", "fp16", "int8"),
            typed=True,
        ),
    )
}


class UnknownTargetError(TargetError, KeyError):
    """A TargetError that a mapping may raise."""


def near_target(name: object) -> str:
    """The target that is meant by a name that none has, "" where none is near. A runtime alone means its CPU."""
    if f"{name}-cpu" in (names := list(TARGETS)):
        return f"{name}-cpu"
    return next(iter(difflib.get_close_matches(str(name), names, n=1)), "")


class _Targets(RowTable[Target]):
    """The targets by name."""

    def unknown(self, name: str) -> Exception:
        near = near_target(name)
        return UnknownTargetError(
            f"no target is called {name!r}",
            expected=", ".join(self),
            fix=f"did you mean {near}?" if near else "`vitdeploy doctor` says which work on this machine",
        )


TARGETS: Mapping[str, Target] = _Targets("vitdeploy.targets", Target, _BUILT_IN)


Row = TypeVar("Row")


class BackendTable(Generic[Row]):
    """What one layer asks of each back end.

    Args:
        layer: the package that asks; `vitdeploy.<layer>` is the group of entry points that adds to the table.
        kind: the class of a row.
        rows: where the row of each back end stands, as "module:attribute".
    """

    def __init__(self, layer: str, kind: type[Row], rows: Mapping[str, str]) -> None:
        self.layer, self.kind, self.rows = layer, kind, rows

    def find(self, target: str) -> Row | None:
        """The row of a target's back end; None where it has none in this layer.

        Raises:
            TargetError: an unknown target.
            HostError: the row of another package cannot be loaded.
        """
        backend = TARGETS[target].backend
        if backend in self.rows:
            row = row_at(self.rows[backend])
            assert isinstance(row, self.kind)
            return row
        entry = entry_points_of(f"vitdeploy.{self.layer}").get(backend)
        return None if entry is None else load_row(entry, self.kind)

    def __getitem__(self, target: str) -> Row:
        """As `find`; raises TargetError where the back end has no row here."""
        row = self.find(target)
        if row is None:
            backend = TARGETS[target].backend
            raise TargetError(
                f"the back end {backend!r} of the target {target} has no part in {self.layer}",
                expected=f"an entry point {backend!r} in the group vitdeploy.{self.layer}",
                fix=f"ask those who make the package of {target}",
            )
        return row
