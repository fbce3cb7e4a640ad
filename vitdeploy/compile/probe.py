"""Does a target work here? Not only installed: its runtime is loaded and asked what it can do."""

from __future__ import annotations

from typing import Any

from vitdeploy.compile.finding import Finding
from vitdeploy.errors import MissingPackageError
from vitdeploy.spec import TARGETS


def probe_target(name: str) -> dict[str, Any]:
    """{"works": bool, "version": str or None, "precisions": [...], "detail": str, "fix": str} for one target.

    A target on a GPU says in its detail what misses first; `probe_nvidia.findings` says everything.
    """
    row = TARGETS[name]
    if row.device == "GPU":
        return _gpu(name)
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


def examine(name: str) -> list[Finding]:
    """Everything that one target needs, in the order in which to fix it."""
    row = TARGETS[name]
    if row.device == "GPU":
        from vitdeploy.compile.probe_nvidia import findings

        return findings(name)
    found = probe_target(name)
    return [Finding(row.package, found["works"], found["detail"], found["fix"])]


def _gpu(name: str) -> dict[str, Any]:
    """Without a driver there is nothing to fix: this is a machine of another kind."""
    from vitdeploy.compile.probe_nvidia import findings, precisions

    found = findings(name)
    missing = next((each for each in found if not each.ok), None)
    if missing is None:
        usable = precisions(name)
        shown = "; ".join(each.detail for each in found if each.name in ("GPU", "TensorRT version", "onnxruntime-gpu"))
        return _result(True, None, usable, f"{shown}; {', '.join(usable)}", "")
    if missing is found[0]:
        return _result(False, None, (), f"not here: {missing.detail}", "")
    return _result(False, None, (), f"{missing.name}: {missing.detail}", missing.fix)


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
