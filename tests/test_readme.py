"""The README and the first guide are executed: every shell block that is no make command, then every Python block."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.command_line import ROOT, command_line
from tests.readme_numbers import demo_block
from vitdeploy import __version__
from vitdeploy.cli.main import cli

ACTIVATE = ". .venv/bin/activate\n"
# Parts of a timm checkpoint by their names in one of transformers.
PARTS = {
    **{"cls_token": "embeddings.cls_token", "pos_embed": "embeddings.position_embeddings"},
    **{"patch_embed.proj": "embeddings.patch_embeddings.projection", "norm": "layernorm"},
    **{"norm1": "layernorm_before", "norm2": "layernorm_after", "attn.proj": "attention.output.dense"},
    **{"mlp.fc1": "intermediate.dense", "mlp.fc2": "output.dense"},
}
SIZES = {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 3, "intermediate_size": 768}
PROCESSOR = {
    **{"image_processor_type": "ViTImageProcessor", "do_resize": True, "size": {"height": 32, "width": 32}},
    **{"resample": 3, "do_rescale": True, "rescale_factor": 1 / 255},
    **{"do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
}
# What the snippets of docs/bundle.md read.
FRAMES = """
import numpy as np

frame = np.zeros((48, 64, 3), np.uint8)
images, pixels, camera = ["seven.png", frame], np.zeros((2, 32, 32, 1), np.uint8), lambda: ["seven.png", frame]
"""
# What the shell runs as `vitdeploy`: it writes its arguments down, one line each, and an empty line after them.
COMMAND = """#!/bin/sh
printf '%s\\n' "$@" '' >> commands
"""


def blocks(language: str, page: str = "README.md") -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder as a reader's clone has it, but with fewer images to judge by; `vitdeploy` is on the path."""
    folder = tmp_path_factory.mktemp("reader")
    theirs, ours = ROOT / "calibration" / "digits", folder / "calibration" / "digits"
    for label in (theirs / "evaluation").iterdir():
        (ours / "evaluation" / label.name).mkdir(parents=True)
        for image in sorted(label.iterdir())[::4]:
            shutil.copy(image, ours / "evaluation" / label.name)
    shutil.copytree(theirs / "calibration", ours / "calibration")
    shutil.copy(theirs / "vit_digits.safetensors", ours)
    write_model_folder(theirs / "vit_digits.safetensors", folder / "my-vit")
    for label in (theirs / "training").iterdir():
        (folder / "my-images" / label.name).mkdir(parents=True)
        for image in sorted(label.iterdir())[:20]:
            shutil.copy(image, folder / "my-images" / label.name)
    command = folder / "bin" / "vitdeploy"
    command.parent.mkdir()
    command.write_text(COMMAND, encoding="utf-8")
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    return folder


def write_model_folder(checkpoint: Path, folder: Path) -> None:
    """The demo's checkpoint as a folder from Hugging Face, for images of three channels."""
    tensors: dict[str, torch.Tensor] = {}
    for key, tensor in load_file(checkpoint).items():
        name, end = (key, "") if key in PARTS else (key.rpartition(".")[0], f".{key.rpartition('.')[2]}")
        prefix = "vit."
        if name.startswith("blocks."):
            _, number, name = name.split(".", 2)
            prefix = f"vit.encoder.layer.{number}."
        if name == "attn.qkv":
            for role, part in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                tensors[f"{prefix}attention.attention.{role}{end}"] = part.contiguous()
        elif name == "head":
            tensors[f"classifier{end}"] = tensor
        else:
            tensors[f"{prefix}{PARTS[name]}{end}"] = tensor
    pixels = "vit.embeddings.patch_embeddings.projection.weight"
    tensors[pixels] = (tensors[pixels] / 3).repeat(1, 3, 1, 1)
    labels = {"id2label": {str(i): str(i) for i in range(10)}, "label2id": {str(i): i for i in range(10)}}
    config = {"model_type": "vit", "architectures": ["ViTForImageClassification"], **SIZES, **labels}
    config |= {"image_size": 32, "patch_size": 4, "num_channels": 3, "layer_norm_eps": 1e-6, "hidden_act": "gelu"}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR), encoding="utf-8")


def run(argv: list[str], folder: Path) -> str:
    """What a process in this folder prints on standard output."""
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_readme_runs_word_for_word(reader: Path, shared_store: Path) -> None:
    """The shell reads the blocks; what it calls is called in this process, which spares loading PyTorch ten times,
    as is the Python that needs it."""
    shell = [block for block in blocks("sh") if not block.startswith("make ")]
    python = blocks("python")
    assert (len(shell), len(python)) == (3, 2)
    for block in shell:
        run(["sh", "-e", "-c", block.replace(ACTIVATE, "")], reader)
    commands = typed(reader, shell)
    assert len(commands) == 7
    printed = io.StringIO()
    with command_line(reader, shared_store, short_bench=True) as vitdeploy:
        for command in commands:
            done = vitdeploy(*command.split("\n"))
            assert done.returncode == 0, done.stderr[-2000:]
        with contextlib.redirect_stdout(printed):
            exec(python[0], {})  # noqa: S102 - of our own page
    assert (reader / "out" / "mine" / "report.html").is_file()
    assert "\ngate        pass" in printed.getvalue()
    assert run([sys.executable, "-c", python[1]], reader).startswith("7 ")
    assert "evaluation images):" in demo_block(reader / "out" / "mine")
    (reader / "out" / "digits").symlink_to("mine")
    shutil.copy(reader / "calibration" / "digits" / "evaluation" / "7" / "0017.png", reader / "seven.png")
    assert "\n7 " in run([sys.executable, "-c", "\n".join([FRAMES, *blocks("python", "docs/bundle.md")])], reader)


def typed(reader: Path, shell: list[str]) -> list[str]:
    """The commands of shell blocks, as their arguments were written down; the next page begins anew."""
    file = reader / "commands"
    commands = file.read_text(encoding="utf-8").split("\n\n")[:-1]
    file.unlink()
    assert len(commands) == sum(block.count("\nvitdeploy ") for block in ("\n" + block for block in shell))
    return commands


def test_the_first_guide_runs_word_for_word(reader: Path, shared_store: Path) -> None:
    page = "docs/get-started.md"
    shell, [python] = blocks("sh", page), blocks("python", page)
    for block in shell:
        run(["sh", "-e", "-c", block.replace(ACTIVATE, "")], reader)
    commands = typed(reader, shell)
    assert len(commands) == 11
    with command_line(reader, shared_store, short_bench=True) as vitdeploy:
        for command in commands:
            done = vitdeploy(*command.split("\n"))
            assert done.returncode == 0, done.stderr[-2000:]
    assert run([sys.executable, "-c", python], reader).startswith("7 ")


# Fenced blocks with their languages, and commands in a text.
FENCE, SPAN = r"^ *```(\w*)\n(.*?)^ *```$", r"(?<![\w`)*.])`(vitdeploy [a-z][^`]+)`"


def shown_commands(text: str) -> Iterator[list[str]]:
    """The arguments of each `vitdeploy ...` on a page, in shell blocks and in lines of text."""
    fences = re.findall(FENCE, text, flags=re.MULTILINE | re.DOTALL)
    shell = "".join(block for language, block in fences if language in ("", "sh", "bash"))
    lines = shell.replace("\\\n", " ").splitlines()
    prose = re.sub(FENCE, "", text, flags=re.MULTILINE | re.DOTALL)
    lines += [" ".join(span.split()) for span in re.findall(SPAN, prose)]
    for line in lines:
        if "vitdeploy " not in line:
            continue
        lexer = shlex.shlex(
            re.sub(r"sha256:\w+\.\.\.", f"sha256:{'0' * 64}", line), posix=True, punctuation_chars="|&;<>"
        )
        lexer.whitespace_split = True
        words = list(lexer)
        while "vitdeploy" in words:
            words = words[words.index("vitdeploy") + 1 :]
            ends = (place for place, word in enumerate(words) if re.fullmatch(r"[|&;<>]+", word))
            yield words[: next(ends, len(words))]


def complaint(words: list[str]) -> str:
    """What the command line says against arguments; arguments that a text leaves out are fine."""
    command: click.Command = cli
    context, arguments = click.Context(cli, info_name="vitdeploy"), words
    try:
        while isinstance(command, click.Group) and arguments and not arguments[0].startswith("-"):
            name, member, arguments = command.resolve_command(context, arguments)
            assert name is not None
            assert member is not None
            command, context = member, click.Context(member, info_name=name, parent=context)
        if not isinstance(command, click.Group) and "--help" not in arguments:
            command.make_context(context.info_name, list(arguments), parent=context.parent)
    except click.MissingParameter:
        return ""
    except click.ClickException as error:
        return f"{' '.join(words)}: {error.message}"
    return ""


def test_the_command_line_takes_every_command_that_a_page_shows() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")]
    shown = [words for page in pages for words in shown_commands(page.read_text(encoding="utf-8"))]
    assert len(shown) > 150
    assert [line for line in map(complaint, shown) if line] == []
    assert "--no-such" in complaint(["run", "mine.yaml", "--no-such"])


def test_the_numbers_of_the_readme_are_of_this_minor_version() -> None:
    """New ones are written by `python -m tests.readme_numbers`."""
    versions = re.findall(r"<!-- numbers: \w+ (\S+) -->", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert [version.split(".")[:2] for version in versions] == [__version__.split(".")[:2]] * 2


def test_every_link_of_the_documents_leads_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("docs/**/*.md")]
    broken = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in pages
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
        if "://" not in link and not (page.parent / link).exists()
    ]
    assert not broken
