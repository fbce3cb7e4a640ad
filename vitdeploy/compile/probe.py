"""Does a target work here? Not only installed: its runtime is loaded and asked what it can do."""

from __future__ import annotations

from typing import Any

from vitdeploy.errors import MissingPackageError
from vitdeploy.spec import TARGETS


def probe_target(name: str) -> dict[str, Any]:
    """{"works": bool, "version": str or None, "precisions": [...], "detail": str, "fix": str} for one target."""
    row = TARGETS[name]
    try:
        version, precisions, detail = _openvino() if row.backend == "openvino" else _onnxruntime()
    except MissingPackageError as error:
        return _result(False, None, (), "not installed", error.fix)
    except Exception as error:  # a broken native library raises whatever it likes
        return _result(
            False,
            None,
            (),
            f"{row.package} does not load: {str(error)[:200]}",
            f"pip install --force-reinstall {row.package}",
        )
    usable = tuple(p for p in row.precisions if p in precisions or (p == "mixed" and "int8" in precisions))
    return _result(True, version, usable, f"{version}, {detail}; {', '.join(usable)}", "")


def _openvino() -> tuple[str, tuple[str, ...], str]:
    import numpy as np

    from vitdeploy.runtime.openvino import require

    openvino = require()
    core = openvino.Core()
    capabilities = core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    parameter = openvino.opset13.parameter([2], np.float32)
    model = openvino.Model([openvino.opset13.relu(parameter)], [parameter], "probe")
    result = core.compile_model(model, "CPU")([np.array([-1.0, 2.0], np.float32)])[0]
    if result.tolist() != [0.0, 2.0]:
        raise RuntimeError(f"a probe gave {result.tolist()} instead of [0.0, 2.0]")
    return openvino.get_version().split("-")[0], tuple(c.lower() for c in capabilities), "a probe ran on the CPU"


def _onnxruntime() -> tuple[str, tuple[str, ...], str]:
    from vitdeploy.runtime.ort import CPU_PROVIDER, require

    runtime = require()
    if CPU_PROVIDER not in runtime.get_available_providers():
        raise RuntimeError(f"{CPU_PROVIDER} is not among {runtime.get_available_providers()}")
    return runtime.__version__, ("fp32", "int8"), f"{CPU_PROVIDER} is there"


def _result(works: bool, version: str | None, precisions: tuple[str, ...], detail: str, fix: str) -> dict[str, Any]:
    return {"works": works, "version": version, "precisions": list(precisions), "detail": detail, "fix": fix}
