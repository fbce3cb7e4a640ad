"""This project's engine, through the steps that `vitdeploy run` takes: export, optimize, calibrate, place, compile.

`seconds` are those from the export on, from which the peers start too.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

from child import Payload, peak_mb, serve
from kernels import float_macs
from prepare import job_of, sha256

from vitdeploy.pipeline.plan import make_plan
from vitdeploy.pipeline.run import run_plan
from vitdeploy.progress import silent
from vitdeploy.spec import encode
from vitdeploy.stages.step import MODEL_FILE, Step, read_engine
from vitdeploy.store.store import Store


def work(payload: Payload) -> Payload:
    folder, target, precision = Path(payload["folder"]), payload["target"], payload["precision"]
    merging = {int(block): count for block, count in payload["merging"].items()}
    changes: Payload = {"token_merging": merging} if merging else {}
    if payload["plain"]:
        changes["split_rows"] = "none"
    job = job_of(
        payload["model"],
        evaluation=1,
        target=target,
        precision=precision,
        optimize=changes,
        budget=payload["budget"],
        bench={"batch": payload["batches"]},
        **({"high_precision": 0} if payload["plain"] else {}),
    )
    last = f"compile {target}-{precision}"
    # An interrupted run continues where it stopped, so the time of each step is recorded when it ends.
    notes = folder / "steps.json"
    made: dict[str, dict[str, float]] = json.loads(notes.read_text(encoding="utf-8")) if notes.is_file() else {}
    started = time.perf_counter()

    def finished(step: Step, reused: bool) -> None:
        nonlocal started
        now = time.perf_counter()
        if not reused:
            made[step.name] = {"seconds": now - started, "peak_mb": peak_mb()}
            notes.write_text(json.dumps(made), encoding="utf-8")
        started = now

    store = Store(folder / "store")
    artifacts = run_plan(_needed(make_plan(job), last), store, resume=True, progress=silent, finished=finished)
    engine = folder / "engine"
    shutil.copytree(artifacts[last].path, engine, dirs_exist_ok=True)
    exported = sha256(artifacts["export"].path / MODEL_FILE)
    if exported != payload["export_sha256"]:
        raise RuntimeError("its export differs from that of the peers")
    answer = {
        "seconds": sum(made[name]["seconds"] for name in artifacts if name != "export"),
        "steps": {name: made[name]["seconds"] for name in artifacts},
        "peak_mb": max(made[name]["peak_mb"] for name in artifacts),
        "optimize": {key: str(value) for key, value in changes.items()},
        "macs_executed": float_macs(artifacts["optimize"].path / MODEL_FILE),
        "run": _run_of(engine, payload["runtime"]),
    }
    shutil.rmtree(store.root)
    return answer


def _run_of(folder: Path, runtime: str) -> Payload:
    """How the engine in `folder` is run, or its graph by another `runtime`."""
    engine = read_engine(folder)
    if runtime:
        return {"kind": runtime, "file": str(folder / engine.graph), "options": {}}
    return {"kind": "engine", "folder": str(folder), "engine": encode(engine)}


def _needed(plan: list[Step], last: str) -> list[Step]:
    """The steps that `last` is made of, in the plan's order, and nothing else."""
    by_name, expected, open_ = {step.name: step for step in plan}, set(), [last]
    while open_:
        name = open_.pop()
        expected.add(name)
        open_ += by_name[name].inputs
    return [step for step in plan if step.name in expected]


if __name__ == "__main__":
    serve(work)
