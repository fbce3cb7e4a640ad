"""An evaluation by 1, 2 and 4 workers, as `benchmarks/scale_model.py` predicts it and as it is measured.

    PYTHONPATH=. python benchmarks/scale_workers.py [--images 12000] [--workers 1 2 4] [-o build/scale/workers.json]
    PYTHONPATH=. python benchmarks/scale_workers.py --parts MODEL CHECKPOINT IMAGES [-o build/scale/parts.json]

What the prediction knows is measured apart from the runs: core seconds to decode an image and to compute its answers,
to start a worker, and of the command itself. The digits under many names are evaluated, by PyTorch and by an engine of
ONNX Runtime, each time with an empty store. Other programs on this machine take cores from both: the cores that they
took during a run are reported, and the prediction has that many fewer.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.scale_costs import Load
from benchmarks.scale_model import Place, Task, Work, simulate
from tests.scale.commands import DIGITS, ROOT, Commands, kept_kinds, many_images

CHECKPOINT, MODEL = DIGITS / "vit_digits.safetensors", "vit_w192d4h3_patch4_32"
SIDES = ("original", "engine")
TIMED_IMAGES, REPEATS = 256, 3
# The work of a worker before its first task, in a separate process, and then on a number of images.
ASK = """
import json, resource, sys, time
from pathlib import Path
import vitdeploy.workflows.sharded
from vitdeploy.data.decoding import decode_each
from vitdeploy.data.folder import scan
from vitdeploy.models.source import Source
from vitdeploy.runtime.predictor import Predictor
from vitdeploy.workflows.subjects import Finder
text, checkpoint, target, graph, images, count, repeats, work = json.loads(sys.argv[1])
source = Source(checkpoint=Path(checkpoint)) if checkpoint else Source()
[subject] = Finder(Path(work), target).find(text, source)
[exported] = Finder(Path(work), "onnxruntime-cpu").find(graph)
preprocess = exported.setting.images
used = lambda: sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
samples = scan(Path(images), "folders")[0].pick(slice(0, count))
with Predictor(subject.runner(), preprocess) as predictor:
    boot = used()
    pixels = [found[0] for found in decode_each(samples, preprocess)]
    begun = used()
    chunks = [pixels[at : at + 8] for at in range(0, count, 8)]
    predictor.outputs(chunks[0])
    taken = []
    for _ in range(repeats):
        at = time.perf_counter(), time.process_time()
        for chunk in chunks:
            predictor.outputs(chunk)
        taken.append((time.perf_counter() - at[0], time.process_time() - at[1]))
seconds, cores = min(taken)
print(json.dumps({"boot": boot, "engine": cores / count, "threads": max(1.0, cores / seconds)}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=12_000)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--parts", nargs=3, help="what one image of another model takes, and nothing else")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vitdeploy-scale-") as folder:
        if options.parts:
            model, checkpoint, images = options.parts
            found: dict[str, object] = dict(
                parts(
                    Path(folder),
                    model,
                    Path(checkpoint).absolute(),
                    (model, "--checkpoint", checkpoint),
                    Path(images).absolute(),
                )
            )
            text = parts_table(found)
        else:
            found = measured(Path(folder), options.images, options.workers * options.repeats)
            text = tables(found)
    file = options.output or ROOT / "build" / "scale" / ("parts.json" if options.parts else "workers.json")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(text)


def parts(
    work: Path, model: str, checkpoint: Path, source: tuple[object, ...], images: Path
) -> dict[str, dict[str, float]]:
    """What single things take: `source` are the words of `vitdeploy export`, which makes `work`/graph."""
    done = Commands(work)("export", *source, "-o", work / "graph")
    assert done.status == 0, done.err[-2000:]
    graph = work / "graph" / "model.onnx"
    return {
        "original": asked(work, (model, str(checkpoint), None), graph, images),
        "engine": asked(work, (str(graph), None, "onnxruntime-cpu"), graph, images),
        "decode": {"core_seconds": decoded(images, graph, work)},
    }


def measured(work: Path, count: int, workers: list[int]) -> dict[str, object]:
    images, graph = many_images(work / "images", count), work / "graph" / "model.onnx"
    single = parts(work, MODEL, CHECKPOINT, (ROOT / "recipes" / "digits.yaml",), images)
    words = ("verify", graph, "--against", MODEL, "--checkpoint", CHECKPOINT, "--target", "onnxruntime-cpu")
    words = (*words, "--data", images, "--json")
    runs = []
    shards = 0
    for number, jobs in enumerate(workers):
        (work / f"run-{number}").mkdir()
        command, load, cpu = Commands(work / f"run-{number}"), Load(), used()
        done = command(*words, "--executor", "processes", "--jobs", jobs)
        assert done.status in (0, 5), done.err[-2000:]
        run = {"workers": jobs, "seconds": done.seconds, "core_seconds": used() - cpu, "other_load": load.share()}
        shards = kept_kinds(command.store, "shard-tally")
        again, cpu = Load(), used()
        second = command(*words, "--executor", "processes", "--jobs", jobs)
        run |= {"second": second.seconds, "second_core_seconds": used() - cpu, "second_load": again.share()}
        runs.append(run)
        print(f"{jobs} workers: {done.seconds:.1f} s", file=sys.stderr, flush=True)
    driver = float(np.median([run["second_core_seconds"] for run in runs]))
    known: dict[str, object] = {"images": count, "shards": shards, "driver": driver, **single}
    cores = len(os.sched_getaffinity(0))
    for run in runs:
        run["predicted"] = predicted(known, int(run["workers"]), cores * (1 - run["other_load"]))
    return {"known": known, "cores": cores, "runs": runs}


def used() -> float:
    """Core seconds of this process and of those that it waited for."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def asked(work: Path, side: tuple[str, str | None, str | None], graph: Path, images: Path) -> dict[str, float]:
    """What a worker takes of cores to start, and for an image."""
    given = json.dumps([*side, str(graph), str(images), TIMED_IMAGES, REPEATS, str(work)])
    words, environment = [sys.executable, "-c", ASK, given], Commands(work).environment()
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, float] = json.loads(done.stdout)
    return found


def decoded(images: Path, graph: Path, work: Path) -> float:
    """Core seconds to decode an image, by the process that does it for an engine."""
    from vitdeploy.data.decoding import decode_each
    from vitdeploy.data.folder import scan
    from vitdeploy.workflows.subjects import Finder

    [exported] = Finder(work, "onnxruntime-cpu").find(str(graph))
    preprocess = exported.setting.images
    samples, _ = scan(images, "folders")
    spent = []
    # The difference of two counts: without what the process takes to start.
    counts = (len(samples) // 5, len(samples))
    for count in counts:
        begun = used()
        assert sum(1 for _ in decode_each(samples.pick(slice(0, count)), preprocess)) == count
        spent.append(used() - begun)
    return (spent[1] - spent[0]) / (counts[1] - counts[0])


def predicted(known: dict[str, object], workers: int, cores: float) -> float:
    """Seconds of the command: first all shards of the original, then all of the engine, each by new workers."""
    from vitdeploy.workflows.sharded import LEAST_PIECES, MOST_AT_ONCE

    shards = int(known["shards"])  # type: ignore[call-overload]
    each = min(MOST_AT_ONCE, -(-shards // LEAST_PIECES))
    pieces = -(-shards // each)
    images = float(known["images"]) / pieces  # type: ignore[arg-type]
    seconds = 0.0
    for side in SIDES:
        what = known[side]
        task = Task(
            images * known["decode"]["core_seconds"],  # type: ignore[index]
            turn_core_seconds=images * what["engine"],  # type: ignore[index]
            turn_threads=what["threads"],  # type: ignore[index]
        )
        work = Work(shards=pieces, shard=task, before=Task(float(known["driver"]) / 2))  # type: ignore[arg-type]
        place = Place(workers=workers, cores=cores, boot=Task(what["boot"]))  # type: ignore[index]
        seconds += simulate(work, place).seconds
    return seconds


def parts_table(known: dict[str, object]) -> str:
    lines = ["| of an image | core ms | threads | start of a worker, core s |", "|---|---|---|---|"]
    for side in SIDES:
        what = known[side]  # type: ignore[index]
        lines.append(f"| {side} | {1e3 * what['engine']:.2f} | {what['threads']:.2f} | {what['boot']:.1f} |")
    lines.append(f"| decoding | {1e3 * known['decode']['core_seconds']:.2f} | 1 | |")  # type: ignore[index]
    return "\n".join(lines)


def tables(found: dict[str, object]) -> str:
    known, runs = found["known"], found["runs"]
    lines = [
        parts_table(known),  # type: ignore[arg-type]
        "",
        f"{known['images']:,} images in {known['shards']} shards; "  # type: ignore[index]
        f"the command itself {known['driver']:.1f} core s; {found['cores']} cores",  # type: ignore[index]
        "",
        "| workers | measured, s | core s | other load | predicted, s | predicted / measured | second run, s |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {run['workers']} | {run['seconds']:.1f} | {run['core_seconds']:.1f} | {100 * run['other_load']:.0f} % "
        f"| {run['predicted']:.1f} | {run['predicted'] / run['seconds']:.2f} | {run['second']:.1f} |"
        for run in runs  # type: ignore[attr-defined]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
