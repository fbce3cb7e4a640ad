"""Shared by all tests: a small model exported once, the embedded digits, and the command line as a child process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DIGITS = ROOT / "calibration" / "digits"
# Small enough to export in a few seconds, and still every part of a ViT.
SMALL_MODEL = "vit_w32d2h2_patch8_32"

Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def digits() -> Path:
    """The embedded data set: training/, calibration/, evaluation/, and vit_digits.safetensors."""
    return DIGITS


@pytest.fixture(scope="session")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seeded weights of SMALL_MODEL with 10 classes and 1 channel."""
    import dataclasses

    import torch
    from safetensors.torch import save_file

    from vitdeploy.models.catalog import config_for
    from vitdeploy.models.vit import VisionTransformer

    torch.manual_seed(1)
    config = dataclasses.replace(config_for(SMALL_MODEL), num_classes=10, in_channels=1)
    model = VisionTransformer(config)
    with torch.no_grad():  # a fresh model's weights are so small that all logits are nearly equal
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    path = tmp_path_factory.mktemp("checkpoint") / "small.safetensors"
    save_file(model.state_dict(), path)
    return path


@pytest.fixture(scope="session")
def small_export(tmp_path_factory: pytest.TempPathFactory, small_checkpoint: Path) -> Path:
    """A folder with SMALL_MODEL's model.onnx (opset 20, dynamic batch, uint8 NHWC in) and export.json."""
    from vitdeploy.pipeline.stages import ExportConfig, export
    from vitdeploy.spec import PreprocessSpec

    out = tmp_path_factory.mktemp("export")
    preprocess = PreprocessSpec(32, (32, 32), "bicubic", (0.5,), (0.5,))
    export(ExportConfig(SMALL_MODEL, "small", preprocess, 20, None, True), small_checkpoint, out)
    return out


@pytest.fixture(scope="session")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One store for all tests that do not test the store, so that equal work is done once."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture
def cli(shared_store: Path, tmp_path: Path) -> Cli:
    """Run `vitdeploy ARGS` as a child process in an empty folder; returns the finished process with its output."""

    def run(
        *args: object, cwd: Path = tmp_path, store: Path = shared_store, timeout: float = 300
    ) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "VITDEPLOY_STORE": str(store), "PYTHONPATH": str(ROOT)}
        return subprocess.run(
            [sys.executable, "-m", "vitdeploy.cli.main", *map(str, args)],
            cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout, check=False,
        )

    return run
