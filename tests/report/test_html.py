"""The page of a report: the least that it can hold, and text that tries to be more than text."""

import copy
import json
import re
from html.parser import HTMLParser

import pytest

from tests.documents import page_of

VERIFY = {
    "n": 64,
    "metric": "top-1",
    "value": 97.5,
    "reference_value": 98.0,
    "agreement_of": "images with the same top-1 answer",
    "top1": 97.5,
    "reference_top1": 98.0,
    "top5": 99.5,
    "reference_top5": 99.5,
    "drop": 0.5,
    "drop_ci95": [-0.5, 1.5],
    "agreement": 99.0,
    "agreement_ci95": [95.0, 99.8],
    "kl": 1e-5,
    "cosine_mean": 0.9999,
    "cosine_min": 0.9998,
    "max_difference": 0.018,
    "diagnosis": "int8 rounding: largest difference 1.8e-02 of the largest logit",
    "same_tensor": {"agreement": 99.0, "max_difference": 0.018},
}
LATENCY = {"p50": 1.0, "p90": 1.2, "p99": 2.0, "mean": 1.1}
REPORT = {
    "format": 1,
    "name": "example",
    "task": "classification",
    "created": "2025-01-02T03:04:05+00:00",
    "verdict": {
        "sentence": "Ship openvino-cpu-int8: 2.00 times as fast as the original [1.80, 2.20].",
        "remarks": ["a remark"],
        "recommended": "openvino-cpu-int8",
        "gate": "pass",
        "reasons": ["a reason"],
    },
    "model": {
        "source": "vit_tiny_patch16_224",
        "parameters": 5_700_000,
        "image_size": [224, 224],
        "channels": 3,
        "classes": 1000,
        "family": "vit",
        "task": "classification",
        "revision": None,
        "notes": ["weights of the EMA"],
        "checkpoint": "weights.safetensors",
        "checkpoint_sha256": "ab" * 32,
    },
    "export": {
        "opset": 20,
        "ir_version": 9,
        "bytes": 127_683,
        "parity": [{"batch": 1, "max_relative_difference": 2e-7}],
        "tolerance": 1e-4,
    },
    "optimize": {
        "rewrites": {"model": {"gelu": 0, "drop_key_bias": 12}},
        "nodes": {"model": [412, 371]},
        "difference": {"model": 2e-7},
    },
    "calibration": {"images": 32, "digest": "cd" * 32},
    "data": {
        "noun": "image",
        "path": "images",
        "labels": "folders",
        "evaluation_images": 64,
        "calibration_images": 32,
        "skipped": 0,
    },
    "engines": [
        {
            "artifact": "openvino-cpu-int8",
            "target": "openvino-cpu",
            "precision": "int8",
            "provider": "CPU",
            "shipped": True,
            "bytes": 189_897,
            "kernels": {"int8": 10},
            "verify": VERIFY,
            "gate": {"status": "pass", "reasons": []},
        }
    ],
    "bench": {
        "protocol": {
            **{"rounds": {"single": 2}, "block_seconds": 0.5, "scenarios": ["single"], "batch": [1], "threads": 0},
        },
        "results": [
            {
                "artifact": artifact,
                "target": target,
                "precision": precision,
                "provider": "CPU",
                "batch": {"single": 1, "offline": 1},
                "latency_ms": LATENCY,
                "throughput": 900.0,
                "flags": ["short"],
                "samples": 500,
                "load_seconds": 0.4,
                "first_inference_ms": 4.0,
            }
            for artifact, target, precision in (
                ("original", "torch", "fp32"),
                ("openvino-cpu-int8", "openvino-cpu", "int8"),
            )
        ],
        "ratios": [
            {"a": "openvino-cpu-int8", "b": "original", "metric": "latency", "ratio": 0.5, "ci95": [0.45, 0.55]}
        ],
        "samples_ms": {"original": [1.9, 2.0, 2.1], "openvino-cpu-int8": [0.9, 1.0, 1.1]},
        "block_medians_ms": {"original": [2.0, 2.0], "openvino-cpu-int8": [1.0, 1.0]},
    },
    "examples": [
        {
            "image": "0.png",
            "label": "cat",
            "reference": {"label": "cat", "score": 0.9},
            "engines": {"openvino-cpu-int8": {"label": "dog", "score": 0.5}},
            "differing": ["openvino-cpu-int8"],
        }
    ],
    "environment": {"cpu": "a CPU", "cores": "2", "python": "3.10.0"},
    "provenance": {
        "recipe": {"name": "example"},
        "source": {"model": "vit_tiny_patch16_224", "revision": None, "sha256": {"weights.safetensors": "ab" * 32}},
        "data": {"calibration": "cd" * 32, "evaluation": "ef" * 32},
        "tools": {"torch": "2.10"},
        "files": [{"path": "export/model.onnx", "bytes": 127_683, "sha256": "01" * 32}],
    },
}
PNG = b"\x89PNG\r\n\x1a\n"
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{7*7}}\u202e\x1b[31m</title></style>"
ALLOWED = re.compile(r"data:image/png;base64,[A-Za-z0-9+/=]+|#[\w-]+")


class Page(HTMLParser):
    """The elements of a page with their attributes, and its text."""

    def __init__(self, html):
        super().__init__()
        self.elements, self.text = [], ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data

    @property
    def loads(self):
        names = ("src", "href", "xlink:href", "srcset", "action", "data", "poster")
        return [values[name] for _, values in self.elements for name in names if name in values]


def without_labels():
    """Of images without labels: no accuracy, only agreement."""
    report = copy.deepcopy(REPORT)
    report["data"]["labels"] = "none"
    for engine in report["engines"]:
        names = ("metric", "value", "reference_value", "drop", "drop_ci95")
        engine["verify"].update(dict.fromkeys((*names, "top1", "reference_top1", "top5", "reference_top5")))
    for example in report["examples"]:
        example["label"] = None
    return report


def without_bench():
    report = copy.deepcopy(REPORT)
    report["bench"] = None
    return report


def least():
    """Neither labels nor bench, calibration, checkpoint, remarks or examples."""
    report = {**without_labels(), "bench": None, "calibration": None, "examples": []}
    report["model"].update(checkpoint=None, checkpoint_sha256=None, notes=[])
    report["provenance"]["source"]["sha256"] = {}
    report["optimize"]["rewrites"]["model"] = {}
    report["verdict"].update(remarks=[], reasons=[], gate="none")
    return report


def hostile():
    """Every text of the report that may be any, and every key that may be chosen by others, replaced."""

    def spoil(value, key=""):
        if isinstance(value, dict):
            return {name: spoil(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [spoil(item, key) for item in value]
        return HOSTILE if isinstance(value, str) else value

    report = spoil(copy.deepcopy(REPORT))
    report["environment"] = {HOSTILE: HOSTILE}
    report["task"] = report["model"]["task"] = "classification"
    report["data"]["noun"] = "image"
    # What is one word of a few is refused when it is read, where it is another.
    report["verdict"]["gate"] = report["engines"][0]["gate"]["status"] = "pass"
    report["bench"]["ratios"][0]["metric"] = "latency"
    report["optimize"] = {name: {HOSTILE: value["model"]} for name, value in report["optimize"].items()}
    report["optimize"]["rewrites"][HOSTILE] = {HOSTILE: 1}
    report["provenance"]["source"]["sha256"] = {HOSTILE: HOSTILE}
    report["provenance"]["recipe"] = {HOSTILE: [HOSTILE]}
    report["examples"][0]["engines"] = {HOSTILE: {"label": HOSTILE, "score": 0.5}}
    return report


REPORTS = [lambda: REPORT, without_labels, without_bench, least, hostile]
NAMES = ["whole", "without labels", "without bench", "least", "hostile"]


@pytest.mark.parametrize("make", REPORTS, ids=NAMES)
def test_a_page_loads_nothing_and_runs_nothing(make):
    html = page_of(make(), {"0.png": PNG})
    page = Page(html)
    assert {tag for tag, _ in page.elements}.isdisjoint({"script", "iframe", "object", "embed", "link", "base", "form"})
    assert not [name for _, values in page.elements for name in values if name.startswith("on")]
    assert all(ALLOWED.fullmatch(load) for load in page.loads)
    assert "@import" not in html
    assert not re.search(r"url\(\s*[\"']?(?!#)", html)


@pytest.mark.parametrize("make", REPORTS[:4], ids=NAMES[:4])
def test_a_page_says_the_verdict_and_shows_no_value_that_is_not_there(make):
    page = Page(page_of(make(), {"0.png": PNG}))
    assert REPORT["verdict"]["sentence"] in page.text
    assert not re.search(r"\b(None|nan|NaN|Undefined)\b", page.text)


def test_accuracy_is_shown_only_with_labels():
    assert "97.50" in page_of(REPORT, {})
    assert "97.50" not in page_of(without_labels(), {})
    assert "99.00" in page_of(without_labels(), {})


def test_latency_is_shown_only_with_a_bench():
    benched, unbenched = (Page(page_of(report, {})).text for report in (REPORT, without_bench()))
    for text in ("0.500", "0.450 to 0.550"):
        assert text in benched
        assert text not in unbenched


def test_an_example_is_shown_with_its_image_and_without():
    with_image, without = (Page(page_of(REPORT, images)) for images in ({"0.png": PNG}, {}))
    assert [load for load in with_image.loads if load.startswith("data:")] == ["data:image/png;base64,iVBORw0KGgo="]
    assert [load for load in without.loads if load.startswith("data:")] == []
    assert "dog" in with_image.text
    assert "dog" in without.text


def test_hostile_text_stays_text():
    html = page_of(hostile(), {})
    page = Page(html)
    assert "<script>alert(1)</script>" in page.text
    assert "<script" not in html
    assert "onerror=alert(2)>" not in html
    assert "{{7*7}}" in page.text
    assert "\u202e" not in html
    assert "\x1b" not in html


def test_a_page_is_a_function_of_the_report():
    assert page_of(REPORT, {"0.png": PNG}) == page_of(json.loads(json.dumps(REPORT)), {"0.png": PNG})


def test_a_page_names_the_board_and_what_it_is_emulated_on():
    facts = {"cpu": "4x Cortex-A76", "board": "Raspberry Pi 5 Model B Rev 1.0", "emulated": "qemu-aarch64 on x86"}
    text = Page(page_of({**REPORT, "environment": facts}, {})).text
    assert "Raspberry Pi 5 Model B Rev 1.0, 4x Cortex-A76, emulated by qemu-aarch64 on x86, " in text
