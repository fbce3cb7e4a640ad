"""`make test-extras`: installs each extra from the wheel into a clean environment, and runs commands that need it.
`make test-pythons`: `all,data,sign` with each Python that this machine has, and the tests of five packages.

It installs the newest releases, as users get them, but PyTorch as in requirements/torch.txt. The extras `tensorrt` and
`cuda` are left out: gigabytes, for a GPU.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent

KEY = """
from cryptography.hazmat.primitives import serialization as s
from cryptography.hazmat.primitives.asymmetric import ec
key = ec.generate_private_key(ec.SECP256R1())
open("key.pem", "wb").write(key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption()))
open("public.pem", "wb").write(key.public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo))
"""
SERVE = """
import subprocess, sys, urllib.request
command = ["bin/vitdeploy", "serve", sys.argv[1], "--port", "0"]
server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
address = next(word for line in server.stdout for word in line.split() if word.startswith("http://")).rstrip("/")
image = urllib.request.Request(address + "/predict", open(sys.argv[2], "rb").read(), {"Content-Type": "image/png"})
assert urllib.request.urlopen(image, timeout=30).status == 200
server.terminate()
assert server.wait(30) == 0
"""
TRANSFORMERS = """
from transformers import ViTMSNConfig, ViTMSNForImageClassification
config = ViTMSNConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8)
ViTMSNForImageClassification(config).save_pretrained("folder")
"""
TIMM = """
import timm
from safetensors.torch import save_file
save_file(timm.create_model("mobilevit_xxs").state_dict(), "weights.safetensors")
"""

# What the words in capitals stand for; BUNDLE is what the first environment makes.
WORDS = {
    **{"KEY": KEY, "SERVE": SERVE, "TRANSFORMERS": TRANSFORMERS, "TIMM": TIMM},
    "OPERATORS": str(ROOT / "tests" / "torchvision_operators.py"),
    "RECIPE": str(ROOT / "recipes" / "digits.yaml"),
    "IMAGE": str(next((ROOT / "calibration" / "digits" / "evaluation" / "7").iterdir())),
}
# The extras of an environment, and what runs there.
WALKS = {
    "all": [
        "bin/vitdeploy run RECIPE --set bench.duration=0.5 -o BUNDLE",
        "bin/python -c 'import pycocotools.cocoeval, huggingface_hub'",
    ],
    "": ["bin/vitdeploy inspect BUNDLE"],
    "onnxruntime": ["bin/vitdeploy predict BUNDLE IMAGE --target onnxruntime-cpu"],
    "openvino": ["bin/vitdeploy predict BUNDLE IMAGE --target openvino-cpu"],
    "bench,onnxruntime": [
        "bin/vitdeploy bench BUNDLE --target onnxruntime-cpu --scenario single --duration 0.1",
        "bin/vitdeploy embed BUNDLE --as web -o page",
    ],
    "bench,onnxruntime,openvino,data": [
        "bin/vitdeploy bench BUNDLE --scenario single --duration 0.1 --history results",
        "bin/vitdeploy history results",
    ],
    "bench,openvino,data,tracking": [
        "bin/vitdeploy bench BUNDLE --target openvino-cpu --scenario single --duration 0.1 --history results",
        "env WANDB_MODE=offline bin/vitdeploy history results --report-to wandb --report-to bencher:measured.json",
    ],
    "serve,openvino": ["bin/python -c SERVE BUNDLE IMAGE"],
    "sign,onnxruntime": [
        "bin/python -c KEY",
        "cp -r BUNDLE signed",
        "bin/vitdeploy bundle sign signed --key key.pem",
        "bin/vitdeploy predict signed IMAGE --trust public.pem --target onnxruntime-cpu",
    ],
    "export": ["bin/vitdeploy export RECIPE -o exported"],
    "export,models": [
        "bin/python OPERATORS",
        "bin/python -c TRANSFORMERS",
        "bin/vitdeploy export hf:folder -o exported",
        "bin/python -c TIMM",
        "bin/vitdeploy export timm:mobilevit_xxs --checkpoint weights.safetensors -o exported-timm",
    ],
}


# The tests are of packages that need no other implementation to compare with.
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TESTS = ("graph", "quantization", "runtime", "bundle", "cli")
WALK_OF_A_PYTHON = [
    *WALKS["all"],
    *WALKS["openvino"],
    *WALKS["serve,openvino"],
    "bin/python -m pip install --quiet pytest pytest-xdist hypothesis",
    f"bin/python -m pytest -q -n 2 --dist loadfile -m 'not slow' --rootdir {ROOT} -c {ROOT}/pyproject.toml "
    + " ".join(f"{ROOT}/tests/{name}" for name in TESTS),
]


def interpreter(version: str) -> str | None:
    """A Python of this version that starts: of PATH or of pyenv."""
    pyenv = Path.home() / ".pyenv" / "versions"
    for python in (shutil.which(f"python{version}"), *pyenv.glob(f"{version}.*/bin/python")):
        if python and not subprocess.run([python, "-c", ""], capture_output=True).returncode:
            return str(python)
    return None


def walk(wheel: Path, extras: str, commands: list[str], shared: Path, python: str = sys.executable) -> str:
    """Install and run; what came of it."""
    words = {**WORDS, "BUNDLE": str(shared / "bundle")}
    environment = {**os.environ, "VITDEPLOY_STORE": str(shared / "store")}
    environment.pop("PYTHONPATH", None)
    what = f"{wheel}[{extras}]" if extras else str(wheel)
    constraint = str(ROOT / "requirements" / "torch.txt")
    with tempfile.TemporaryDirectory() as folder:
        steps = [
            [python, "-m", "venv", folder],
            ["bin/python", "-m", "pip", "install", "--quiet", "--constraint", constraint, what],
            *([words.get(word, word) for word in shlex.split(command)] for command in commands),
        ]
        for step in steps:
            done = subprocess.run(step, cwd=folder, env=environment, capture_output=True, text=True)
            if done.returncode:
                return f"failed: {shlex.join(step)[:200]}\n{done.stdout[-1000:]}{done.stderr[-1500:]}"
    counts = re.search(r"\d+ passed.*", done.stdout)
    return f"passed ({counts[0]})" if counts else "passed"


def main() -> None:
    wheel, *expected = sys.argv[1:]
    failed = False
    if expected == ["--pythons"]:
        for version in PYTHONS:
            outcome, python = f"skipped: neither PATH nor pyenv has python{version}", interpreter(version)
            if python:
                with tempfile.TemporaryDirectory() as shared:
                    outcome = walk(Path(wheel).absolute(), "all,data,sign", WALK_OF_A_PYTHON, Path(shared), python)
            failed |= outcome.startswith("failed")
            print(f"Python {version}: {outcome}", flush=True)
        sys.exit(failed)
    with tempfile.TemporaryDirectory() as shared:
        for extras in ["all", *(expected or list(WALKS)[1:])]:
            outcome = walk(Path(wheel).absolute(), extras, WALKS[extras], Path(shared))
            failed |= outcome.startswith("failed")
            print(f"vitdeploy[{extras}]: {outcome}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
