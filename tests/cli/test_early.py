"""What is wrong with a path, a name or a key is said before PyTorch, ONNX or a runtime is imported."""

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from vitdeploy.models.catalog import FAMILIES, find
from vitdeploy.models.names import NAMES, check_name, unknown_model

HEAVY = (
    *("torch", "onnx", "onnx_ir", "onnxscript", "onnxruntime", "openvino", "scipy", "matplotlib", "transformers"),
    *("pyarrow", "model_signing"),
)

# One process for all: each command is called as the shell would, and leaves what it has imported.
WALK = """
import contextlib, io, json, sys
from vitdeploy.cli.main import main
found = []
commands, heavy = json.loads(sys.argv[1])
for arguments in commands:
    sys.argv = ["vitdeploy", *arguments]
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            main()
        except SystemExit as left:
            found.append([left.code, said.getvalue().partition("  ")[0].rpartition("\\n")[2]])
print(json.dumps([found, sorted(name for name in heavy if name in sys.modules)]))
"""

LONG = "n" * 300  # more than a file system takes
RECIPE = {
    "vitdeploy": 1,
    "name": "early",
    "source": {"model": "vit_w32d2h2_patch8_32"},
    "preprocess": {"resize": 32, "crop": 32, "mean": [0.5], "std": [0.5]},
    "data": {"path": "images"},
    "targets": ["openvino-cpu"],
}
# Refused before what reads recipes is imported, too.
AT_ONCE = [
    (["run", "absent.yaml"], "VD2002"),
    (["tune", "absent.yaml"], "VD2002"),
    (["sweep", "absent.yaml"], "VD2002"),
    (["history", "absent"], "VD2002"),
    (["history", "r.yaml"], "VD2000"),
    (["embed", "absent", "--as", "cpp", "-o", "out"], "VD2002"),
    (["explain", "absent", "x.png", "-o", "out.png"], "VD2002"),
    (["bundle", "sign", "absent", "--key", "absent"], "VD2002"),
    (["bundle", "sign", "bundle", "--key", "absent"], "VD2002"),
    (["bundle", "verify", "bundle", "--trust", "absent"], "VD2002"),
    (["predict", "bundle", "absent.png"], "VD2002"),
    (["inspect", "empty.onnx"], "VD2202"),
]
COMMANDS = [
    (["bench", "bundle", "--trust", "absent"], "VD2002"),
    (["compare", "bundle", "bundle", "--trust", "absent"], "VD2002"),
    (["verify", "bundle", "--against", "bundle", "--data", "images", "--trust", "absent"], "VD2002"),
    (["bench", "broken"], "VD3102"),
    (["lab", "versions", "absent", "--runtime", "openvino==2026.3"], "VD2002"),
    (["export", "empty.onnx", "-o", "out"], "VD2202"),
    (["compile", "empty.onnx", "--target", "openvino-cpu", "-o", "out"], "VD2202"),
    (["export", "hf:./images", "-o", "out"], "VD2002"),
    (["run", "r.yaml", "--set", "precison=int8"], "VD2001"),
    (["run", "r.yaml", "--set", "targets=[]"], "VD2001"),
    (["run", "r.yaml", "--set", "source.model=resnet50"], "VD2101"),
    (["run", "r.yaml", "--set", "source.checkpoint=absent.pt"], "VD2002"),
    (["run", "r.yaml", "--set", "source.model=absent.onnx"], "VD2002"),
    (["run", "r.yaml", "--set", "source.labels=absent.txt"], "VD2002"),
    (["run", "r.yaml", "--set", "data.annotations=absent.json"], "VD2002"),
    (["run", "r.yaml", "--set", "precision=fp8"], "VD4002"),
    (["run", "r.yaml", "-o", "full"], "VD2003"),
    (["tune", "r.yaml", "--target", "openvino-tpu"], "VD2402"),
    (["tune", "r.yaml", "--set", "data.path=absent"], "VD2002"),
    (["sweep", "r.yaml", "absent.yaml"], "VD2002"),
    (["export", "resnet50", "-o", "out"], "VD2101"),
    (["export", LONG, "-o", "out"], "VD2101"),
    (["export", f"{LONG}.onnx", "-o", "out"], "VD2002"),
    (["export", f"hf:./{LONG}", "-o", "out"], "VD2002"),
    (["export", "--checkpoint", LONG, "-o", "out"], "VD2002"),
    (["run", "r.yaml", "--set", f"source.checkpoint={LONG}"], "VD2002"),
    (["run", "r.yaml", "--set", f"data.path={LONG}"], "VD2002"),
    (["inspect", LONG], "VD2002"),
    (["optimize", f"/{LONG}", "-o", "out"], "VD2002"),
    (["compile", LONG, "--target", "openvino-cpu", "-o", "out"], "VD2002"),
    (["predict", LONG, "image.png"], "VD2002"),
    (["export", "hf:./absent", "-o", "out"], "VD2002"),
    (["export", "--checkpoint", "absent", "-o", "out"], "VD2002"),
    (["optimize", "absent", "-o", "out"], "VD2002"),
    (["quantize", "absent", "--data", "images", "--target", "openvino-cpu", "-o", "out"], "VD2002"),
    (["compile", "absent", "--target", "openvino-cpu", "-o", "out"], "VD2002"),
    (["compile", "absent", "--target", "openvino-tpu", "-o", "out"], "VD2402"),
    (["verify", "absent/x", "--against", "resnet50", "--data", "images"], "VD2002"),
    (["bench", "absent.onnx"], "VD2002"),
    (["bench", "resnet50"], "VD2101"),
    (["compare", "absent", "absent"], "VD2002"),
    (["inspect", "absent"], "VD2002"),
    (["inspect", "report.json"], "VD2202"),
    (["inspect", "absent", "--target", "openvino-tpu"], "VD2402"),
    (["predict", "absent", "x.png"], "VD2002"),
    (["lab", "selftest", "--target", "absent"], "VD2402"),
    (["doctor", "--target", "absent"], "VD2402"),
]


@pytest.mark.parametrize(("commands", "heavy"), [(AT_ONCE, (*HEAVY, "pydantic")), (COMMANDS, HEAVY)])
def test_paths_names_and_keys_are_checked_before_anything_heavy_is_imported(tmp_path, small_bundle, commands, heavy):
    (tmp_path / "r.yaml").write_text(json.dumps(RECIPE), encoding="utf-8")
    (tmp_path / "report.json").write_text("{}", encoding="utf-8")
    (tmp_path / "bundle").symlink_to(small_bundle)
    for name in ("images/a.png", "full/thesis.txt", "broken/manifest.json", "empty.onnx"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    done = subprocess.run(
        [sys.executable, "-c", WALK, json.dumps([[arguments for arguments, _ in commands], heavy])],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found, imported = json.loads(done.stdout)
    assert [code for _, code in found] == [code for _, code in commands]
    assert all(left == int(code[2]) for left, code in found)
    assert imported == []


def test_the_names_that_need_no_pytorch_are_those_of_the_catalog():
    assert {family.name: tuple(family.names) for family in FAMILIES} == NAMES
    assert [family.name for family in FAMILIES] == list(NAMES)


@pytest.mark.parametrize(
    "name",
    [
        *("vit_w32d2h2_patch8_32", "vit_small_patch16_512", "vit_base_patch16_siglip_gap_256"),
        *("deit_w64d2h2_distilled_patch16_224", "deit3_base_patch16_256", "swin_w32d2-2h2-4_patch4_window7_224"),
        *("detr_r1-1-1-1c8_w32h4e1d1q3_64", "transformer_w32e1d1h2_v12_l10", "vit_w64d4h2_patch14_reg4_dinov2"),
    ],
)
def test_names_that_are_spelled_out_pass_the_early_check(name):
    assert find(name) is not None
    check_name(name)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("resnet50", "if timm has it: timm:resnet50"),
        ("vit_bas_patch16_224", "did you mean vit_base_patch16_224"),
        ("swin_tiny_window7_224", "did you mean swin_tiny_patch4_window7_224"),
        ("my_model:build", "for a function of your own: --model my_model:build"),
        ("a model", "`vitdeploy export list` shows all"),
    ],
)
def test_a_model_of_another_kind_is_not_what_is_proposed(name, fix):
    assert fix in unknown_model(name).fix
