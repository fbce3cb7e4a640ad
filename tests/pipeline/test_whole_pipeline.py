"""`vitdeploy run`, once, for both targets; the other tests look at what it made."""

import hashlib
import itertools
import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import numpy as np
import onnx
import pytest
from PIL import Image

from tests.command_line import command_line
from tests.report_schema import FILE
from vitdeploy.benchmark import evidence as quiet
from vitdeploy.benchmark import summary as decided
from vitdeploy.bundle.read import read_bundle, verify_files
from vitdeploy.document.report import read_report
from vitdeploy.runtime import Monitor, load
from vitdeploy.spec import encode
from vitdeploy.stages.step import in_words

TARGETS = ("openvino-cpu", "onnxruntime-cpu")
ENGINES = ["openvino-cpu-int8", "onnxruntime-cpu-int8", "openvino-cpu-fp32", "onnxruntime-cpu-fp32"]
STEPS = [
    *("reference", "export", "optimize", "calibrate"),
    *(f"{verb} openvino-cpu-int8" for verb in ("high_precision", "place", "parts", "compile")),
    *(f"{verb} onnxruntime-cpu-int8" for verb in ("high_precision", "place", "compile")),
    *(f"{verb} {engine}" for engine in ENGINES[2:] for verb in ("place", "compile")),
    *(f"verify {engine}" for engine in ENGINES),
    "attention",
]
RECIPE = """
vitdeploy: 1
name: whole-line
source: {{model: vit_w32d2h2_patch8_32, checkpoint: {checkpoint}}}
preprocess: {{resize: 32, crop: 32, interpolation: bicubic, mean: [0.5], std: [0.5]}}
data: {{path: {digits}, labels: folders, calibration: {{images: 32}}, evaluation: {{images: 64}}, seed: 0}}
optimize: {{float_rest: fp32}}  # the same steps on every CPU
precision: int8
targets: [openvino-cpu, onnxruntime-cpu]
budget: {{min_agreement: 80}}
bench: {{scenarios: [single], batch: [1], duration: 0.5}}
"""


@pytest.fixture(scope="module")
def line(tmp_path_factory, digits, small_checkpoint):
    """The finished run: its recipe, bundle, report and what it printed. Nothing in its store is touched by tests."""
    home = tmp_path_factory.mktemp("whole")
    recipe, store, bundle = home / "recipe.yaml", home / "store", home / "bundle"
    recipe.write_text(RECIPE.format(checkpoint=small_checkpoint, digits=digits), encoding="utf-8")
    with command_line(home, store, short_bench=True) as command:
        done = command("run", "recipe.yaml", "-o", "bundle", "--json", "-v")
    assert done.returncode == 0, done.stderr
    report = json.loads((bundle / "report.json").read_text(encoding="utf-8"))
    return SimpleNamespace(recipe=recipe, store=store, bundle=bundle, report=report, done=done)


def files(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_the_bundle_holds_these_files_and_no_other(line):
    ships = line.report["verdict"]["ships"]
    placed = {"onnxruntime-cpu": ["graph.onnx"], "openvino-cpu": ["graph.onnx", "model.bin", "model.xml"]}
    homes = {}
    for name in ships:  # a second engine of a target has a folder of its own name
        target = name.rpartition("-")[0]
        homes[name] = target if target not in homes.values() else name
    assert files(line.bundle) == sorted(
        [
            *("bom.cdx.json", "calibration.json"),
            *(f"engines/{home}/{file}" for name, home in homes.items() for file in placed[name.rpartition("-")[0]]),
            *(f"golden/{name}.npz" for name in ("inputs", "outputs", *ships)),
            *("labels.txt", "manifest.json", "model.onnx", "monitor.json", "report.html", "report.json"),
        ]
    )


def test_the_report_is_what_its_published_schema_says(line):
    jsonschema.validate(line.report, json.loads(FILE.read_text(encoding="utf-8")))
    assert encode(read_report(line.bundle / "report.json")) == line.report


def test_the_bundle_ships_what_was_asked_for_and_what_is_recommended(line):
    manifest, verdict = read_bundle(line.bundle), line.report["verdict"]
    assert [engine.artifact for engine in manifest.engines] == verdict["ships"]
    assert {f"{target}-int8" for target in TARGETS} <= set(verdict["ships"])
    assert manifest.gates == dict.fromkeys(verdict["ships"], "pass")
    recommended = None if verdict["recommended"] == "original" else verdict["recommended"]
    assert manifest.recommended == recommended
    assert recommended in (None, verdict["ships"][0])


def test_on_a_machine_that_is_never_quiet_the_grade_says_so_everywhere(line, monkeypatch, tmp_path):
    """And nothing holds beside others: the answers pass all the same, and the order of the recipe holds."""
    with command_line(tmp_path, line.store, short_bench=True) as command:
        monkeypatch.setattr(quiet, "_is_quiet", lambda *block: False)
        monkeypatch.setattr(decided, "LEAST_CLAIM", math.inf)
        done = command("run", line.recipe, "-o", "bundle", "--require-recommendation")
        monkeypatch.undo()
    report, manifest = read_report(tmp_path / "bundle" / "report.json"), read_bundle(tmp_path / "bundle")
    grade = report.verdict.grade
    assert (grade, manifest.grade, manifest.recommended) == ("no ranking", "no ranking", None)
    assert done.returncode == 5 and f"the verdict is '{grade}'" in done.stderr and "quiet machine" in done.stderr
    assert report.verdict.gate == "pass" and report.verdict.rivals == manifest.rivals
    assert f"Speed: {grade}" in (tmp_path / "bundle" / "report.html").read_text(encoding="utf-8")
    assert [engine.artifact for engine in manifest.engines] == ENGINES[:2]
    with load(tmp_path / "bundle") as predictor:
        assert "in a fixed order" in predictor.why


def test_the_manifest_lists_every_file_with_its_digest(line):
    manifest = read_bundle(line.bundle)
    listed = {entry.path: entry.sha256 for entry in manifest.files}
    found = {name: hashlib.sha256((line.bundle / name).read_bytes()).hexdigest() for name in files(line.bundle)}
    assert found.pop("manifest.json")
    assert listed == found


def test_nothing_temporary_is_left_beside_the_bundle_or_in_the_store(line):
    assert list(line.bundle.parent.rglob(".tmp-*")) == []


def test_every_onnx_file_passes_the_checker(line):
    graphs = sorted(line.bundle.rglob("*.onnx"))
    assert len(graphs) == 1 + len(line.report["verdict"]["ships"])
    for graph in graphs:
        onnx.checker.check_model(onnx.load(graph), full_check="openvino" not in str(graph))


def test_the_labels_are_the_class_folders(line):
    assert (line.bundle / "labels.txt").read_text(encoding="utf-8").split() == list("0123456789")


def test_one_json_document_on_standard_output_which_is_the_report(line):
    assert json.loads(line.done.stdout) == line.report


def test_every_step_is_made_in_order(line):
    lines = line.done.stderr.splitlines()
    assert [text for text in lines if text.startswith(("made", "reused"))] == [f"made {step}" for step in STEPS]


def test_the_last_lines_name_the_bundle_and_what_to_do_next(line):
    *_, last, following = line.done.stderr.splitlines()
    assert re.fullmatch(r"done in \d+\.\d s, [\d.]+ [kM]B in bundle", last)
    assert following == "next: open bundle/report.html, or: vitdeploy predict bundle IMAGE"


def test_the_report_has_these_parts(line):
    assert {"name", "verdict", "model", "export", "calibration", "data", "engines", "bench"} <= set(line.report)
    assert {"examples", "environment", "provenance", "created", "format", "task"} <= set(line.report)
    assert line.report["model"]["classes"] == 10
    assert line.report["data"]["noun"] == "image"
    assert line.report["optimize"]["rewrites"]["model"]["class_token_only"] == 1
    assert line.report["optimize"]["difference"]["model"] <= 1e-4
    assert line.report["data"]["evaluation_images"] == 64
    assert line.report["calibration"]["images"] == 32
    assert max(row["max_relative_difference"] for row in line.report["export"]["parity"]) <= 1e-4


def test_how_folders_became_classes_is_told_before_the_work(line):
    mapping, lines = line.report["data"]["mapping"], line.done.stderr.splitlines()
    assert (mapping["how"], mapping["classes"]) == ("position", 10)
    assert lines.index(mapping["text"]) < lines.index("made reference")


def test_an_original_that_knows_its_classes_is_not_doubted(line):
    assert line.report["warnings"] == []


def test_an_original_that_knows_nothing_is_doubted_before_the_verdict(tmp_path, digits, seeded_checkpoint):
    text = RECIPE.format(checkpoint=seeded_checkpoint, digits=digits).replace("min_agreement: 80", "min_agreement: 0")
    (tmp_path / "recipe.yaml").write_text(text.replace("precision: int8", "precision: fp32"), encoding="utf-8")
    with command_line(tmp_path, tmp_path / "store", short_bench=True) as command:
        done = command("run", "recipe.yaml", "-o", "bundle", "--set", "targets=[onnxruntime-cpu]", "--json")
    report = json.loads((tmp_path / "bundle" / "report.json").read_text(encoding="utf-8"))
    [warning] = report["warnings"]
    assert re.match(r"the original's top-1 is [\d.]+ % of 64 images, and chance is 10 %: ", warning)
    lines = done.stderr.splitlines()
    assert lines.index(f"warning: {warning}") < lines.index(report["verdict"]["sentence"])


def test_the_report_says_what_became_of_the_answers(line, digits):
    found, examples = line.report["answers"], line.report["examples"]
    assert set(found["changed"]) == set(ENGINES)
    for engine in line.report["engines"]:
        verify, changed = engine["verify"], found["changed"][engine["artifact"]]
        assert changed["changed"] == round(verify["n"] * (1 - verify["agreement"] / 100))
        assert changed["lost"] - changed["gained"] == round(verify["n"] * verify["drop"] / 100)
        assert np.sum(found["confusion"]["matrix"][engine["artifact"]]) == verify["n"]
    assert set(found["reliability"]) == {"original", *ENGINES}
    differing = {each["number"] for each in examples if each["why"] == "changed"}
    assert bool(differing) == any(each["changed"] for each in found["changed"].values())
    assert all((digits / each["sample"]).is_file() for each in examples)


def test_the_report_verifies_every_engine_on_all_images(line):
    engines = line.report["engines"]
    assert [engine["artifact"] for engine in engines] == ENGINES
    assert [engine["shipped"] for engine in engines] == [True, True, False, False]
    for engine in engines:
        assert engine["verify"]["n"] == 64
        assert engine["verify"]["agreement"] >= (100 if "fp32" in engine["artifact"] else 90)
        assert engine["verify"]["metric"] == "top-1"
        assert engine["verify"]["reference_value"] == engine["verify"]["reference_top1"]
        assert engine["verify"]["diagnosis"].startswith("the same function" if "fp32" in engine["artifact"] else "int8")


@pytest.mark.parametrize("target", TARGETS)
def test_an_int8_engine_is_called_int8_because_its_kernels_are(line, target):
    [engine] = [e for e in line.report["engines"] if e["artifact"] == f"{target}-int8"]
    assert engine["precision"] == "int8"
    assert engine["kernels"]["int8"] >= 8


def test_the_bench_has_a_row_for_each_and_a_ratio_for_each_pair(line):
    bench = line.report["bench"]
    assert [row["artifact"] for row in bench["results"]] == ["original", *ENGINES]
    for row in bench["results"]:
        assert 0 < row["latency_ms"]["p50"] <= row["latency_ms"]["p90"] <= row["latency_ms"]["p99"]
    pairs = [(name, "original") for name in ENGINES]
    pairs += [(f"{target}-int8", f"{target}-fp32") for target in TARGETS]
    pairs += [each for each in itertools.combinations(ENGINES, 2) if each not in pairs]
    assert [(ratio["a"], ratio["b"]) for ratio in bench["ratios"]] == pairs
    assert all(ratio["ci95"][0] <= ratio["ratio"] <= ratio["ci95"][1] for ratio in bench["ratios"])


def test_the_verdict_is_one_sentence_that_people_are_shown_too(line):
    verdict = line.report["verdict"]
    assert re.fullmatch(r"(Ship [a-z0-9-]+|Keep the original|Not decided[a-z ]+): .*\.", verdict["sentence"])
    assert verdict["recommended"] in [None, "original", *ENGINES]
    assert (verdict["recommended"] is None) == verdict["sentence"].startswith("Not decided")
    assert verdict["sentence"] in line.done.stderr
    assert verdict["sentence"] in (line.bundle / "report.html").read_text(encoding="utf-8")


def test_the_html_report_loads_nothing_from_elsewhere(line):
    html = (line.bundle / "report.html").read_text(encoding="utf-8")
    loads = re.findall(r"""(?:src|href|srcset|action|data)\s*=\s*["']?([^"'\s>]+)|url\(["']?([^"')]+)|@import""", html)
    assert loads
    assert all("".join(load).startswith(("data:", "#")) for load in loads)
    assert "<script" not in html


def test_the_report_does_not_name_folders_of_this_machine_beside_the_recipe(line):
    provenance = line.report["provenance"]
    assert line.report["model"]["checkpoint"] == "small.safetensors"
    assert provenance["source"]["sha256"] == {"small.safetensors": line.report["model"]["checkpoint_sha256"]}
    assert provenance["recipe"]["name"] == "whole-line"
    assert all(not Path(entry["path"]).is_absolute() for entry in provenance["files"])


@pytest.mark.parametrize("target", TARGETS)
def test_a_predictor_gives_the_golden_outputs_within_the_tolerance(line, target):
    golden = read_bundle(line.bundle).golden
    with load(line.bundle, target) as predictor:
        own = golden.engines[predictor.target]
        with np.load(line.bundle / golden.inputs) as given, np.load(line.bundle / own.outputs) as expected:
            inputs, outputs = given["image"], expected["logits"]
        logits = predictor.outputs(list(inputs))["logits"]
    assert inputs.shape == (8, 32, 32, 1)
    assert logits.shape == outputs.shape == (8, 10)
    assert np.abs(logits - outputs).max() / np.abs(outputs).max() <= 1e-3 <= own.tolerance <= 0.1


@pytest.mark.parametrize("target", TARGETS)
def test_an_engine_that_is_watched_knows_its_images_from_others(line, target, digits):
    images = [
        np.asarray(Image.open(path).convert("L"))[:, :, None] for path in sorted(digits.glob("evaluation/*/*.png"))
    ]
    events = []
    options = Monitor(window=64, every=20, share=float("inf"), on_event=events.append)
    with load(line.bundle, target, monitor=options) as predictor:
        assert predictor.monitor.watched == ("inputs", "outputs", "canary", "non-finite")
        predictor.predict_batch(images[:: len(images) // 64][:64])
        assert (predictor.monitor.state, events) == ("steady", [])
        predictor.predict_batch([255 - image for image in images[:64]])
        assert (predictor.monitor.state, [event.kind for event in events]) == ("drift", ["inputs"])
        assert (predictor.monitor.counts.canaries, predictor.monitor.counts.wrong) == (6, 0)


def test_an_app_gets_the_engine_that_is_listed_first(line):
    with load(line.bundle) as predictor:
        assert predictor.target == line.report["verdict"]["ships"][0]


def test_the_bundle_can_be_moved(line, tmp_path, digits):
    moved = shutil.copytree(line.bundle, tmp_path / "elsewhere" / "moved")
    verify_files(moved, read_bundle(moved))
    image = next(digits.glob("evaluation/7/*.png"))
    with load(line.bundle) as here, load(moved) as there:
        assert here.predict(image) == there.predict(image)


def test_inspect_reads_the_bundle_and_checks_its_digests(line, cli):
    done = cli("inspect", line.bundle)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("bundle whole-line: classification, format 1, ")
    assert "files, all digests match\n" in done.stdout
    assert "engine onnxruntime-cpu-int8: CPUExecutionProvider, batch 1," in done.stdout


def test_predict_names_the_label_of_each_image(line, cli, digits):
    images = sorted(digits.glob("evaluation/*/*.png"))[:3]
    done = cli("predict", line.bundle, *images, "--target", "openvino-cpu", "--top", 2, "--json")
    document = json.loads(done.stdout)
    assert document["engine"] in ("openvino-cpu-int8", "openvino-cpu-fp32")
    assert [entry["image"] for entry in document["predictions"]] == [str(image) for image in images]
    for entry in document["predictions"]:
        assert entry["label"] == entry["top"][0]["label"] in list("0123456789")
        assert len(entry["top"]) == 2


def test_a_dry_run_shows_what_a_change_makes_again_and_computes_nothing(line, tmp_path):
    before = files(line.store)
    with command_line(tmp_path, line.store) as command:
        done = command("run", line.recipe, "-o", "new", "--set", "data.seed=1", "--dry-run")
    assert done.returncode == 0, done.stderr
    plan = dict(reversed(text.split(maxsplit=1)) for text in done.stdout.splitlines()[: len(STEPS)])
    assert list(plan) == [in_words(step) for step in STEPS]
    assert "prepare the graph of openvino-cpu-int8" in plan and "choose token rows of openvino-cpu-int8" in plan
    floats = (f"{verb} {target}-fp32" for target in TARGETS for verb in ("prepare the graph of", "compile"))
    unchanged = ["export", "optimize", *floats]
    # The digits bring their own split, so the seed chooses other images of both parts.
    assert sorted(step for step, what in plan.items() if what == "reuse") == sorted(unchanged)
    assert files(line.store) == before
    assert list(tmp_path.iterdir()) == []


def test_a_budget_that_is_met_gives_no_reasons(line):
    verdict = line.report["verdict"]
    assert (verdict["gate"], verdict["reasons"], verdict["budget"]) == ("pass", [], "min_agreement 80")
