"""The self-test: the whole flow for real on a CPU target with a tiny model; and a machine that lacks everything."""

import json

import numpy as np
import pytest
import torch

from tests import forked
from tests.command_line import command_line
from tests.sabotage import sabotage_int8
from vitdeploy.backends import TARGETS
from vitdeploy.benchmark import process
from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.document.bench import ErrorFacts
from vitdeploy.document.commands import SelftestDocument, StepFacts
from vitdeploy.errors import CapabilityError
from vitdeploy.models.load import load_model
from vitdeploy.models.source import Source
from vitdeploy.models.torch_runner import COMPILED, CompiledRunner, TorchRunner
from vitdeploy.pipeline.reference_worker import make_compiled
from vitdeploy.progress import silent
from vitdeploy.recipe.load import validate
from vitdeploy.runtime import nvidia
from vitdeploy.spec import encode
from vitdeploy.store.store import Store
from vitdeploy.workflows.selftest import REPORT_NAMES, Case, default_cases, run_selftest

CPU = "onnxruntime-cpu"
SHORT = Protocol(scenarios=("single",), batch=(1,), duration=0, block_seconds=0.02, min_rounds=3, warmup=0, processes=1)


@pytest.fixture
def no_driver(monkeypatch):
    monkeypatch.setattr(nvidia, "LIBRARIES", ("libnocuda.so.1",))


@pytest.fixture(scope="module")
def recipe(digits):
    """recipe(checkpoint): the recipe of a case, by target."""

    def recipe(checkpoint):
        return lambda target: validate(
            {
                "vitdeploy": 1,
                "name": "tiny",
                "source": {"model": "vit_w32d2h2_patch8_32", "checkpoint": str(checkpoint)},
                "preprocess": {"resize": 32, "crop": 32, "mean": [0.5], "std": [0.5]},
                "data": {"path": str(digits), "calibration": {"images": 16}, "evaluation": {"images": 80}},
                "targets": [target],
                "precision": "fp32",
            },
            "tiny",
        )

    return recipe


@pytest.fixture(scope="module")
def report(tmp_path_factory, small_checkpoint, recipe):
    """(document, folder) of a self-test of two cases, of which the second has no weights."""
    home = tmp_path_factory.mktemp("selftest")
    cases = [Case("tiny", True, recipe(small_checkpoint)), Case("gone", False, recipe(home / "none.safetensors"))]
    out = home / "out"
    out.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "subprocess", forked.SUBPROCESS)
        document = run_selftest(CPU, cases, out, Store(home / "store"), protocol=SHORT, progress=silent)
        return encode(document), out


def test_every_step_is_done_and_a_failing_one_does_not_end_the_rest(report):
    document, _ = report
    rows = [(row["model"], row["step"], row["status"]) for row in document["steps"]]
    engines = [f"{CPU}-{step}" for step in ("fp32", "fp32 answers", "int8", "int8 answers")]
    assert rows == [
        *(("tiny", step, "done") for step in ("prepare", *engines, "bench")),
        ("gone", "prepare", "failed"),
        *(("gone", step, "not run") for step in (*engines, "bench")),
    ]
    assert (document["works"], document["passed"]) == (True, False)
    assert document["sentence"] == f"{CPU}: 6 of 7 steps done; 5 not run. 1 failed."


def test_each_engine_is_compared_with_pytorch_and_timed_beside_it(report):
    document, _ = report
    tiny = document["models"][0]
    assert [engine["precision"] for engine in tiny["engines"]] == ["fp32", "int8"]
    assert tiny["engines"][0]["verify"]["agreement"] == 100
    assert [engine["verify"]["n"] for engine in tiny["engines"]] == [80, 80]
    assert tiny["engines"][1]["kernels"]["int8"] > 0
    names = ["original", f"{CPU}-fp32", f"{CPU}-int8"]
    assert [row["artifact"] for row in tiny["bench"]["results"]] == names
    assert [(row["a"], row["b"]) for row in tiny["bench"]["ratios"]] == [(name, "original") for name in names[1:]]


def test_a_failure_has_its_error_and_its_log(report):
    document, out = report
    row = next(row for row in document["steps"] if row["status"] == "failed")
    assert row["error"]["code"] == "VD2002"
    assert "none.safetensors" in row["detail"]
    log = (out / row["log"]).read_text(encoding="utf-8")
    assert log.startswith("VD2002")
    assert "Traceback" in log


def test_the_report_is_one_folder_that_says_the_same(report):
    document, out = report
    assert {path.name for path in out.iterdir()} == set(REPORT_NAMES)
    assert json.loads((out / "selftest.json").read_text(encoding="utf-8")) == document
    page = (out / "report.html").read_text(encoding="utf-8")
    assert document["sentence"] in page
    for text in (*(row["step"] for row in document["steps"]), "gone", document["steps"][4]["log"]):
        assert text in page
    assert "<script" not in page
    assert (out / "doctor.txt").read_text(encoding="utf-8").startswith("ok")


@pytest.mark.parametrize("target", ["tensorrt", "onnxruntime-cuda"])
def test_a_machine_that_lacks_everything_gets_a_complete_report(tmp_path, shared_store, no_driver, target):
    with command_line(tmp_path, shared_store) as here:
        done = here("lab", "selftest", "--target", target, "--json")
    assert done.returncode == 4, done.stderr
    document = json.loads(done.stdout)
    out = tmp_path / "out" / f"selftest-{target}"
    assert json.loads((out / "selftest.json").read_text(encoding="utf-8")) == document
    assert (document["works"], document["models"]) == (False, [])
    assert document["doctor"][0]["fix"].startswith("install NVIDIA's driver")
    cases = default_cases()
    tried = [p for p in ("fp32", "fp16", "int8", "fp8") if p in TARGETS[target].precisions]
    assert len(document["steps"]) == len(cases) * (2 * len(tried) + 2)
    assert {row["status"] for row in document["steps"]} == {"not run"}
    assert all(row["detail"].startswith("needs NVIDIA driver and ") for row in document["steps"])
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "does not work here, so nothing was run: it needs NVIDIA driver and " in page
    assert "<td>0.0</td>" not in page  # of what was not run
    assert "install NVIDIA&#39;s driver" in page
    assert {path.name for path in out.iterdir()} == {"selftest.json", "report.html", "doctor.txt"}
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def test_an_engine_with_other_answers_fails_the_self_test(recipe, small_checkpoint, monkeypatch, tmp_path):
    """It is built, it runs, and it answers wrongly."""
    sabotage_int8(monkeypatch)
    monkeypatch.setattr(process, "subprocess", forked.SUBPROCESS)
    out = tmp_path / "out"
    out.mkdir()
    cases = [Case("tiny", True, recipe(small_checkpoint)), Case("seeded", False, recipe(small_checkpoint))]
    found = encode(run_selftest(CPU, cases, out, Store(tmp_path / "store"), protocol=SHORT, progress=silent))
    rows = {(row["model"], row["step"]): row for row in found["steps"]}
    assert not found["passed"] and rows["tiny", f"{CPU}-int8"]["status"] == "done"
    assert rows["tiny", f"{CPU}-fp32 answers"]["status"] == "done"
    wrong = rows["tiny", f"{CPU}-int8 answers"]
    assert wrong["status"] == "failed" and wrong["error"]["code"] == "VD5001" and "budget 95" in wrong["detail"]
    # Of a model that was never trained INT8 is not judged, and that is told.
    assert rows["seeded", f"{CPU}-int8 answers"]["status"] == "not run"
    assert rows["seeded", f"{CPU}-fp32 answers"]["status"] == "done"


@pytest.mark.parametrize(("code", "status"), [("VD5001", 5), ("VD4201", 4), (None, 0)])
def test_the_exit_code_tells_wrong_answers_from_what_does_not_run(code, status, tmp_path, monkeypatch, shared_store):
    from vitdeploy.workflows import selftest as run

    def told(target, cases, work, store, *, protocol, progress):
        (work / "doctor.txt").write_text("ok\n")
        error = ErrorFacts(code, "", 1, "", "", "") if code else None
        row = StepFacts("m", "s", "failed" if code else "done", 0.0, error=error)
        return SelftestDocument(1, target, "", True, code is None, "", (), (row,), (), {})

    monkeypatch.setattr(run, "run_selftest", told)
    with command_line(tmp_path, shared_store) as here:
        assert here("lab", "selftest", "--target", CPU).returncode == status


def test_an_unknown_target_is_refused(tmp_path, shared_store):
    with command_line(tmp_path, shared_store) as here:
        assert here("lab", "selftest", "--target", "abacus").returncode == 2


def test_the_cases_have_recipes_for_every_target():
    digits, base = default_cases()
    for target in TARGETS:
        assert digits.recipe(target).targets == base.recipe(target).targets == (target,)
    assert digits.recipe(CPU).source.checkpoint.endswith("vit_digits.safetensors")
    assert (base.recipe(CPU).source.model, base.trained) == ("vit_base_patch16_224", False)


def test_without_a_checkout_the_user_is_told_where_to_run_it(tmp_path, monkeypatch):
    import vitdeploy
    from vitdeploy.errors import MissingFileError

    monkeypatch.setattr(vitdeploy, "__file__", str(tmp_path / "site" / "vitdeploy" / "__init__.py"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingFileError, match=r"recipes/digits\.yaml") as caught:
        default_cases()[0].recipe(CPU)
    assert "checkout" in caught.value.fix


# --- PyTorch at its best ----------------------------------------------------------------------------------------------


def test_the_compiled_original_gives_the_originals_answers_in_half_precision(small_checkpoint):
    """Its code on the CPU, with the compiler left out: that needs the GPU to be worth its time."""
    source = Source("vit_w32d2h2_patch8_32", small_checkpoint)
    image = np.random.default_rng(0).standard_normal((3, 1, 32, 32), np.float32)
    with TorchRunner(load_model(source)) as plain:
        expected = plain.infer({"image": image})["logits"]
    with torch.compiler.set_stance("force_eager"), CompiledRunner(load_model(source), device="cpu") as runner:
        ours = runner.infer({"image": image})["logits"]
        assert (runner.provider, runner.inputs[0].dtype, ours.dtype) == (COMPILED, "float32", np.float32)
    assert 0 < np.abs(ours - expected).max() < 0.02 * np.abs(expected).max()


def test_pytorch_compiles_each_batch_for_itself(small_checkpoint, monkeypatch):
    asked = {}
    monkeypatch.setattr(torch, "compile", lambda module, **options: asked.update(options) or module)
    CompiledRunner(load_model(Source("vit_w32d2h2_patch8_32", small_checkpoint)), device="cpu").load()
    assert asked == {"mode": "reduce-overhead", "dynamic": False}


def test_without_cuda_the_compiled_original_is_refused(small_checkpoint):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    request = {"model": "vit_w32d2h2_patch8_32", "checkpoint": str(small_checkpoint), "threads": 0, "batch": 1}
    with pytest.raises(CapabilityError, match="PyTorch here has no CUDA device"):
        make_compiled(request).load()
