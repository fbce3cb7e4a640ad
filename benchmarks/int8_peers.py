"""INT8 beside the peers: one table of accuracy, latency, throughput, coverage and cost of making.

python benchmarks/int8_peers.py vit_tiny_patch16_224 vit_base_patch16_224 \
    --checkpoint vit_tiny.safetensors --data images/ --work work/ -o out/

Every artifact is made from the same export and the same calibration images, judged on the same evaluation images (the
split of `vitdeploy run`, seed 0), and measured in a process of its own, in blocks that alternate over all artifacts.
The checkpoint is the first model's; the others have seeded weights, measured for speed only. Writes int8_peers.md
and int8_peers.json (with every ratio) to the output folder. What peer fails, or is not installed, has a row saying so.

The work folder keeps what was made, with the seconds and the memory that it took, so that a second run measures only;
delete <work>/<model>/<artifact> to have it made again. Measurements are never kept, unless --append asks for it:
`--steps measure --scenarios offline --rounds 4 --append` three times is one measurement of 12 rounds in three pieces.

Some peers want an environment of their own, with torch as in requirements/torch.txt:

    for name in nncf pt2e executorch openvino-ep; do python3 -m venv environments/$name; done
    environments/nncf/bin/pip install nncf==3.4.0 openvino==2026.4.1 onnx torch==2.13.0
    environments/pt2e/bin/pip install torch==2.13.0 torchao==0.18.0 numpy pillow safetensors cloudpickle
    environments/executorch/bin/pip install executorch==1.5.1 torch==2.13.0 pillow safetensors cloudpickle
    environments/openvino-ep/bin/pip install onnxruntime-ep-openvino==1.8.1 onnxruntime==1.32.0 numpy pillow
    python benchmarks/int8_peers.py ... --environments environments/
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import uuid
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))
import child
import measure
import table
from catalog import CATALOG, EAGER, NNCF, OURS, Entry

from vitdeploy.runtime.host import describe_host, usable_cores
from vitdeploy.spec import encode
from vitdeploy.verification.agreement import compare

STEPS = ("make", "evaluate", "measure", "rate")
ROWS = (64, 96, 128, 160, 192, 197, 208, 224, 256, 320, 384, 512)
PACKAGES = ("vitdeploy", "openvino", "onnxruntime", "torch", "onnx")


class Bench:
    """One model: its folder in the work folder, and the steps that fill it."""

    def __init__(self, name: str, checkpoint: Path | None, options: argparse.Namespace) -> None:
        self.name, self.checkpoint, self.options = name, checkpoint, options
        self.folder: Path = options.work.resolve() / name
        self.data = self.folder / "data"
        self.entries = [entry for entry in CATALOG if not options.only or entry.name in options.only]

    def _child(self, script: str, folder: Path, payload: dict[str, Any], python: str = sys.executable) -> Any:
        everywhere = {"data_folder": str(self.data), "folder": str(folder), "threads": self.options.threads}
        log = folder / f"{Path(script).stem}.log"
        return child.call(script, {**everywhere, "model": self._model(), **payload}, log, python=python)

    def _model(self) -> dict[str, Any]:
        checkpoint = str(self.checkpoint.resolve()) if self.checkpoint else None
        data = str(self.options.data.resolve())
        return {"name": self.name, "checkpoint": checkpoint, "data": data, "images": self.options.images}

    def facts(self) -> dict[str, Any]:
        """What all artifacts share, made when it is not there."""
        file = self.data / "facts.json"
        if not file.is_file():
            say(f"{self.name}: export, and read the images")
            found = self._child("prepare.py", self.data, {})
            if "error" in found:
                raise SystemExit(f"{self.name} cannot be exported: {found['error']} (see {self.data}/prepare.log)")
            write(file, found)
        return read(file)

    def record(self, entry: Entry) -> dict[str, Any]:
        """How an artifact was made, or why it was not."""
        file = self.folder / entry.name / "record.json"
        return read(file) if file.is_file() else {"error": "not made yet"}

    def make(self) -> None:
        facts = self.facts()
        for entry in self.entries:
            folder = self.folder / entry.name
            if (folder / "record.json").is_file():
                continue
            folder.mkdir(parents=True, exist_ok=True)
            say(f"{self.name}: make {entry.name}")
            write(folder / "record.json", self._made(entry, folder, facts))

    def _made(self, entry: Entry, folder: Path, facts: dict[str, Any]) -> dict[str, Any]:
        if entry.labelled and not (self.checkpoint and (self.data / "calibration_labels.npy").is_file()):
            return {"error": "left out: it needs trained weights and labels"}
        python = self._python(entry.environment)
        if not Path(python).is_file():
            return {"error": f"left out: --environments has no {entry.environment}"}
        record = self._child(entry.script, folder, {**entry.options, **facts}, python)
        if "error" in record:
            return record
        batch, streams = measure.SCENARIOS["streams"].batch, measure.SCENARIOS["streams"].streams
        run = record["run"]
        kernels = self._child("kernels.py", folder, {"run": run, "batch": batch, "streams": streams}, self._runs(run))
        # Tells this artifact from another one made later under the same name, which its measurements are not of.
        return {**record, **kernels, "id": uuid.uuid4().hex}

    def _python(self, environment: str) -> str:
        """The interpreter of an environment."""
        folder: Path = self.options.environments.absolute()
        return str(folder / environment / "bin" / "python") if environment else sys.executable

    def _runs(self, run: dict[str, Any]) -> str:
        """The interpreter that runs an artifact."""
        return self._python(run.get("environment", ""))

    def usable(self) -> dict[str, dict[str, Any]]:
        """The records of the artifacts that run, by name."""
        records = {entry.name: self.record(entry) for entry in self.entries}
        return {name: record for name, record in records.items() if "error" not in record}

    def evaluate(self) -> None:
        facts = self.facts()
        for name, record in self.usable().items() if self.checkpoint else ():
            folder = self.folder / name
            if not (folder / "logits.npy").is_file():
                say(f"{self.name}: {name} on the evaluation images")
                payload = {"run": record["run"], "preprocess": facts["preprocess"]}
                answer = self._child("evaluate.py", folder, payload, self._runs(record["run"]))
                if "error" in answer:
                    write(folder / "record.json", {**record, **answer})

    def measure(self) -> None:
        for name in self.options.scenarios:
            usable = self.usable()
            if not usable:
                continue
            requests = {artifact: record["run"] for artifact, record in usable.items()}
            runs = {artifact: {**run, "python": self._runs(run)} for artifact, run in requests.items()}
            ids = {artifact: record["id"] for artifact, record in usable.items()}
            rounds, threads = self.options.rounds, self.options.threads
            session = measure.run(measure.SCENARIOS[name], runs, ids, rounds, threads, self._progress)
            file = self._sessions(name)
            before = read(file) if self.options.append and file.is_file() else []
            write(file, [*before, session])

    def _valid(self, sessions: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The sessions without the measurements of artifacts that have been made again since."""
        ids = {entry.name: self.record(entry).get("id") for entry in CATALOG}
        return [
            {**each, "entries": {k: v for k, v in each["entries"].items() if ids[k] is not None and v["id"] == ids[k]}}
            for each in sessions
        ]

    def _sessions(self, scenario: str) -> Path:
        return self.folder / f"measured-{scenario}.json"

    def _progress(self, text: str, done: int, total: int) -> None:
        if sys.stderr.isatty():
            say(f"{self.name}: {text} ({done}/{total})".ljust(100), end="\r")
        elif done in (0, total):
            say(f"{self.name}: {text}")

    def rate(self) -> None:
        """The best INT8 rate for every K and N of our linears, alternating with the engine."""
        record = self.usable().get(OURS)
        if record is None or not record.get("layers"):
            return
        shapes = sorted({(layer["k"], layer["n"]) for layer in record["layers"] if layer["rows"] > 1})
        say(f"{self.name}: INT8 rate of {len(shapes)} shapes")
        payload = {"shapes": shapes, "rows": ROWS, "seconds": self.options.rate_seconds, "run": record["run"]}
        found = self._child("rate.py", self.folder, payload)
        write(self.folder / "rate.json", found)

    def results(self) -> dict[str, Any]:
        measured = {
            name: measure.summary(scenario, self._valid(read(self._sessions(name))), self.options.threads)
            for name, scenario in measure.SCENARIOS.items()
            if self._sessions(name).is_file()
        }
        artifacts = {entry.name: self._artifact(entry) for entry in CATALOG if (self.folder / entry.name).is_dir()}
        found = {**self.facts(), "checkpoint": self.checkpoint is not None, "artifacts": artifacts}
        return {**found, "measured": measured, "rate": self._share(artifacts, measured)}

    def _artifact(self, entry: Entry) -> dict[str, Any]:
        record = {"precision": entry.precision, "note": entry.note, **self.record(entry)}
        ours, reference = (self.folder / name / "logits.npy" for name in (entry.name, EAGER))
        labels = self.data / "evaluation_labels.npy"
        if "error" in record or not (ours.is_file() and reference.is_file()):
            return record
        truth = np.load(labels) if labels.is_file() else None
        return {**record, "accuracy": encode(compare(np.load(ours), np.load(reference), truth))}

    def _share(self, artifacts: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any] | None:
        """Executed MACs per second over the best rate, which is that of the linears one after the other."""
        file, rows = self.folder / "rate.json", measured.get("single", {}).get("rows", {})
        if not file.is_file() or OURS not in rows or "error" in (found := read(file)):
            return None
        rates = {(each["k"], each["n"]): each["macs_per_second"] for each in found["rates"]}
        macs = dict.fromkeys(rates, 0)
        for layer in artifacts[OURS]["layers"]:
            if (shape := (layer["k"], layer["n"])) in rates:
                macs[shape] += layer["rows"] * layer["k"] * layer["n"]
        best = sum(macs.values()) / sum(macs[shape] / rates[shape] for shape in rates)
        latency_ms = float(np.median(found["engine_ms"]))
        executed = artifacts[OURS]["macs_executed"] / (latency_ms / 1e3)
        return {
            **found,
            "macs": artifacts[OURS]["macs_executed"],
            "executed": executed,
            "best": best,
            "share": 100 * executed / best,
            "peer_share": self._peer_share(rows, latency_ms, best),
        }

    def _peer_share(self, rows: dict[str, Any], latency_ms: float, best: float) -> float | None:
        """The same of NNCF's engine, which executes the whole export, by what it takes to ours in the benchmark run."""
        if NNCF not in rows:
            return None
        slower = rows[NNCF]["latency_ms"]["p50"] / rows[OURS]["latency_ms"]["p50"]
        return 100 * self.facts()["macs_executed"] / (slower * latency_ms / 1e3) / best


def say(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)


def write(file: Path, value: Any) -> None:
    """Complete or not at all: a run may be interrupted."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    temporary.replace(file)


def read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="names of built-in models for classification")
    parser.add_argument("--checkpoint", type=Path, help="weights of the first model")
    parser.add_argument("--data", type=Path, required=True, help="folder of images, one sub-folder a class")
    parser.add_argument("--images", type=int, default=128, help="how many of them calibrate (default: %(default)s)")
    parser.add_argument("--work", type=Path, required=True, help="folder for what is made")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder for the table")
    parser.add_argument("--environments", type=Path, default=Path("environments"), help="folder of the peers' own")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="of every runtime (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=12, help="blocks of an artifact and scenario (default: %(default)s)"
    )
    parser.add_argument("--append", action="store_true", help="add to the rounds that the work folder has")
    parser.add_argument(
        "--steps", nargs="*", choices=STEPS, default=STEPS, help="the table is written after any of them"
    )
    parser.add_argument("--scenarios", nargs="+", choices=measure.SCENARIOS, default=tuple(measure.SCENARIOS))
    parser.add_argument("--only", nargs="+", choices=[entry.name for entry in CATALOG], help="these artifacts")
    parser.add_argument("--rate-seconds", type=float, default=0.5, help="for each K, N and rows (default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    chosen = options()
    # Children under other interpreters, which do not have this project installed, import it from here.
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
    benches = [Bench(name, chosen.checkpoint if i == 0 else None, chosen) for i, name in enumerate(chosen.models)]
    for bench in benches:
        for step in STEPS:
            if step in chosen.steps:
                getattr(bench, step)()
    models = {bench.name: bench.results() for bench in benches}
    results = {
        # Paths of this machine say nothing on another one.
        "command": shlex.join(["python", *(Path(arg).name if Path(arg).is_absolute() else arg for arg in sys.argv)]),
        "host": describe_host(),
        "versions": child.package_versions(PACKAGES),
        "threads": chosen.threads,
        "scenarios": {each.name: each.text for each in measure.SCENARIOS.values()},
        "models": models,
        "goals": table.goals(models),
    }
    write(chosen.output / "int8_peers.json", results)
    text = table.markdown(results)
    (chosen.output / "int8_peers.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
