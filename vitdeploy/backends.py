"""The targets, and one table of back ends per layer.

A target is a back end on a kind of device. The functions that a layer needs from a back end are a row of that layer's
table: a frozen dataclass of functions, defined in the back end's own file and imported at first use. `runtime`,
`compilation`, `benchmark` and `quantization` each have a table in their `backend.py`.

Another package adds a back end by entry points: its targets in the group `vitdeploy.targets` (a `Target` by target
name), and its rows in `vitdeploy.runtime`, `vitdeploy.compilation`, `vitdeploy.benchmark` and `vitdeploy.quantization`
(by the name of the back end).
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from vitdeploy.errors import TargetError
from vitdeploy.extensions import RowTable, entry_points_of, load_row, row_at
from vitdeploy.spec import Precision


@dataclass(frozen=True)
class Target:
    """One row of the capability table: a back end on a device.

    `module` is the Python module of the runtime, `package` its pip package, `extra` the extra of vitdeploy that
    installs it ("" for none). `typed`: half precision is written into the graph; other targets have it as a setting of
    the runtime.
    """

    name: str
    backend: str
    device: str
    extra: str
    package: str
    module: str
    precisions: tuple[Precision, ...]
    typed: bool = False


_openvino_device = partial(
    Target, backend="openvino-device", extra="openvino", package="openvino", module="openvino", typed=True
)
_onnxruntime_gpu = partial(
    Target,
    backend="onnxruntime-gpu",
    device="GPU",
    extra="cuda",
    package="onnxruntime-gpu",
    module="onnxruntime",
    typed=True,
)
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
            # Half precision is a runtime hint; compilation queries the runtime for the support of this CPU.
            precisions=("fp32", "fp16", "bf16", "int8", "mixed", "int4"),
        ),
        _openvino_device("openvino-gpu", device="Intel GPU", precisions=("fp32", "fp16", "int8")),
        _openvino_device("openvino-npu", device="Intel NPU", precisions=("fp16", "int8")),
        _openvino_device("openvino-auto", device="AUTO device", precisions=("fp32", "fp16", "int8")),
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
        _onnxruntime_gpu("onnxruntime-cuda", precisions=("fp32", "fp16", "bf16")),
        _onnxruntime_gpu("onnxruntime-tensorrt", precisions=("fp32", "fp16", "int8")),
    )
}


class UnknownTargetError(TargetError, KeyError):
    """A TargetError that a mapping may raise."""


def near_target(name: object) -> str:
    """The target closest to an unknown name, "" if none is close. The name of a runtime means its CPU target."""
    if f"{name}-cpu" in (names := list(TARGETS)):
        return f"{name}-cpu"
    return next(iter(difflib.get_close_matches(str(name), names, n=1)), "")


class _Targets(RowTable[Target]):
    """The targets by name."""

    def unknown(self, name: str) -> Exception:
        near = near_target(name)
        return UnknownTargetError(
            f"unknown target {name!r}",
            expected=", ".join(self),
            fix=f"did you mean {near}?" if near else "`vitdeploy doctor` lists the targets that work on this machine",
        )


TARGETS: Mapping[str, Target] = _Targets("vitdeploy.targets", Target, _BUILT_IN)


Row = TypeVar("Row")


class BackendTable(Generic[Row]):
    """The functions that one layer needs from each back end.

    Args:
        layer: the package of the layer; the entry points `vitdeploy.<layer>` add to the table.
        kind: the class of a row.
        rows: the location of each back end's row, as "module:attribute".
    """

    def __init__(self, layer: str, kind: type[Row], rows: Mapping[str, str]) -> None:
        self.layer, self.kind, self.rows = layer, kind, rows

    def find(self, target: str) -> Row | None:
        """The row of a target's back end; None if it has no row in this layer.

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
        """Like `find`, but raises TargetError if the back end has no row in this layer."""
        row = self.find(target)
        if row is None:
            backend = TARGETS[target].backend
            raise TargetError(
                f"the back end {backend!r} of target {target} does not support {self.layer}",
                expected=f"an entry point {backend!r} in the group vitdeploy.{self.layer}",
                fix=f"report it to the authors of the package that provides {target}",
            )
        return row
