"""One of every kind of page, each with everything that it can show, and names as long as they get."""

import copy
import io

import numpy as np
from PIL import Image

from tests.documents import page_of
from tests.history.made import history_of_everything
from tests.report.answered import answered, example
from tests.report.bench_runs import bench
from tests.report.test_context import bench as with_context
from tests.report.test_half import HALF
from tests.report.test_html import LATENCY, REPORT, VERIFY, hostile
from tests.report.test_quantization import MIXED, PLACED, SENSITIVITY
from tests.report.test_tuning import DOCUMENT as TUNED
from vitdeploy.document.commands import SelftestDocument
from vitdeploy.document.comparison import ComparisonDocument
from vitdeploy.document.sweep import SweepDocument, TuneDocument
from vitdeploy.report.html import (
    render_history,
    render_regression,
    render_selftest,
    render_sensitivity,
    render_sweep,
    render_tuning,
)
from vitdeploy.search.precision import Sensitivity
from vitdeploy.spec import decode

TARGETS = ("openvino-cpu", "onnxruntime-cpu", "onnxruntime-tensorrt", "tensorrt")
ENGINES = [f"{target}-{precision}" for target in TARGETS for precision in ("int8", "fp32")][:7]
FLAGS = ["unstable", "contended", "short"]
ENVIRONMENT = {"cpu": "a CPU of some long name @ 2.50GHz", "cores": "2", "system": "Linux 6.18", "python": "3.10.0"}


def picture():
    """A PNG of noise, as an example's image."""
    buffer = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (24, 32, 3), np.uint8)
    Image.fromarray(pixels).save(buffer, "png")
    return buffer.getvalue()


def run_report(names=ENGINES, scenarios=("single", "offline", "sustain:12s")):
    """The report of a run of eight artifacts, with answers that differ, every search, and three image sizes."""
    report = copy.deepcopy(REPORT)
    engine = report["engines"][0] | {"provider": "CPUExecutionProvider", "kernels": {"fp32": 2, "int8": 49}}
    verify = VERIFY | {"drop_ci95": [-10.25, 11.5], "agreement_ci95": [99.0, 100.0]}
    report["engines"] = [
        engine | {"artifact": name, "shipped": not i % 2, "verify": verify} for i, name in enumerate(names)
    ]
    mixed = {**PLACED, "sensitivity": SENSITIVITY, "mixed": MIXED}
    report["engines"][0] |= {"quantization": mixed, "weight_bits": 7, "half": HALF}
    report["bench"] = bench(["original", *names], scenarios) | {"context": with_context()["context"]}
    for result in report["bench"]["results"]:
        result["flags"] = FLAGS
        if result["artifact"] != "original":
            result["parts_ms"] = {"image_tower": 1.5, "text_tower": 0.25}
    answer = {"label": "golden retriever, a dog of some length", "score": 0.9}
    other = {"label": "Labrador retriever", "score": 0.41234}
    report["examples"] = [
        {
            "image": "0.png" if number else "lost.png",
            "label": answer["label"],
            "reference": answer,
            "engines": {name: other if number < 2 and i % 3 == 0 else answer for i, name in enumerate(names)},
            "differing": [name for i, name in enumerate(names) if number < 2 and i % 3 == 0],
        }
        for number in range(4)
    ]
    report["warnings"] = ["The original is right on 4.25 % of the images: is the class order right?", "a second line"]
    report["bench"]["undecided"] = {names[1]: "other work took 30 % of the processors", names[2]: "the same " * 20}
    report["answers"] = answered(names, 20, names=[f"class of a name that is long {i}" for i in range(20)])
    marks = {kind: [[0.1 * i, 0.1, 0.1 * i + 0.3, 0.6]] for i, kind in enumerate(("both", "original", "artifact"))}
    report["examples"] += [
        example(9, "changed", names, answers=["dog"] * 3, marks=marks),
        example(10, "unsure", names),
        example(11, "usual", names),
    ]
    maps = [{"artifact": name, "image": "0.png", "on_patches": 0.9, "shared": 0.97} for name in names[:3]]
    report["attention"] = {
        "grid": [14, 14],
        "reader": "last attention, read by the class token",
        "blocks": 12,
        "left_out": {names[-1]: "1 of its 12 attention blocks can be read"},
        "examples": [
            {"example": i, "maps": [{**maps[0], "artifact": "original", "shared": None}, *maps]} for i in range(3)
        ],
    }
    row = {"gate": "pass", "recommended": names[0], "value": 97.5, "agreement": 99.0, "throughput": 900.0}
    row |= {"sentence": "Ship it.", "leading": names[0], "latency_ms": LATENCY | {"p50": 1.25}}
    report["sizes"] = [
        {**row, "size": size, "path": f"sizes/{size}/" if size != "224x224" else ""} for size in ("224x224", "192x192")
    ]
    return report


def odd_names():
    """The report of which every name is markup; what is one word of a few is such a word."""
    report = hostile()
    for each in (*report["engines"], *report["bench"]["results"]):
        each["precision"] = "int8"
    report["engines"][0]["kernels"] = {"int8": 10}
    for engine in report["engines"]:
        engine["verify"]["metric"] = "top-1"
    return report


def compare_document():
    names = [f"{side} {engine}" for engine in ENGINES[:2] for side in ("baseline", "candidate")]
    ratio = {"ratio": 1.0512, "ci95": [0.966, 1.127], "difference": "no difference"}
    accuracy = {"how": "same files", "n": 64, "metric": "top-1", "baseline": 98.0, "candidate": 97.5, "drop": 0.5}
    return {
        "format": 1,
        "created": "2025-01-02T03:04:05+00:00",
        "baseline": "shipped/vit-tiny-imagenet",
        "candidate": "out/vit-tiny-imagenet",
        "measured": True,
        "limits": {"max_drop": 1.0, "max_slowdown": None},
        "sentence": "Whether the candidate keeps within the limits is not decided.",
        "gate": {"status": "undecided", "reasons": [f"{ENGINES[0]}: latency +4.9 % [-13.4, +27.2]; undecided"]},
        "engines": [
            {
                "engine": engine,
                "accuracy": accuracy | {"drop_ci95": [-10.5, 11.5], "agreement": 99.0, "agreement_ci95": [99.0, 100.0]},
                "ratios": [ratio | {"metric": metric} for metric in ("latency", "throughput")],
                "flags": FLAGS,
                "same_engine": False,
                "checks": [
                    {"name": name, "status": status, "reasons": []}
                    for name, status in (("accuracy", "fail"), ("latency", "undecided"), ("throughput", "none"))
                ],
            }
            for engine in ENGINES[:2]
        ],
        "remarks": ["a remark"],
        "bench": bench(names),
        "environment": ENVIRONMENT,
        "digests": [
            {"name": "engines/openvino-cpu/graph.onnx", "baseline": "ab" * 32, "candidate": "cd" * 32},
            {"name": "labels.txt", "baseline": None, "candidate": "cd" * 32},
        ],
    }


def selftest_document():
    measured = bench(["original", *ENGINES[:2]])
    engines = [
        {
            "artifact": name,
            "precision": "int8",
            "provider": "CPUExecutionProvider",
            "options": {},
            "device": {},
            "kernels": {"int8": 24, "fp32": 1},
            "bytes": 1_951_136,
            "verify": VERIFY,
        }
        for name in ENGINES[:2]
    ]
    step = {
        "model": "digits",
        "seconds": 40.7,
        "detail": "refused, as the driver is of another version",
        "log": "logs/1.txt",
    }
    return {
        "format": 1,
        "created": "2025-01-02T03:04:05+00:00",
        "target": "onnxruntime-cuda",
        "works": True,
        "passed": False,
        "sentence": "onnxruntime-cuda: 2 of 3 steps done.",
        "doctor": [
            {"name": "onnxruntime-gpu", "ok": ok, "detail": "1.31.1 is there", "fix": "pip install onnxruntime-gpu"}
            for ok in (True, False)
        ],
        "steps": [step | {"step": f"the step {status}", "status": status} for status in ("done", "failed", "not run")],
        "models": [{"name": "digits", "trained": False, "engines": engines, "bench": measured}],
        "environment": ENVIRONMENT,
    }


def sweep_document():
    error = {"code": "VD2304", "message": "the checkpoint does not fit the model", "found": "12 blocks"}
    error |= {"exit_code": 2, "expected": "", "fix": ""}
    found = run_report(ENGINES[:3], ("single",))
    return {
        "format": 1,
        "created": "2025-01-02T03:04:05+00:00",
        "recipes": [
            {
                "name": "vit-tiny-imagenet",
                "recipe": "a.yaml",
                "report": found,
                "error": None,
            },
            {"name": "swin-tiny", "recipe": "b.yaml", "report": None, "error": error},
        ],
        "environment": ENVIRONMENT,
    }


def pages():
    """Every page by its name."""
    images = {"0.png": picture()}
    recipe = "vitdeploy: 1\nname: tuned  # " + "a long line " * 12
    return {
        "run": page_of(run_report(), images),
        "odd names": page_of(odd_names(), images),
        "compare": render_regression(decode(ComparisonDocument, compare_document())),
        "sweep": render_sweep(decode(SweepDocument, sweep_document())),
        "history": render_history(history_of_everything()),
        "tune": render_tuning(decode(TuneDocument, TUNED), recipe),
        "selftest": render_selftest(decode(SelftestDocument, selftest_document())),
        "sensitivity": render_sensitivity(decode(Sensitivity, SENSITIVITY), "vit-tiny-imagenet"),
    }
