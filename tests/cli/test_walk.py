"""A walk of sixty bad inputs: each leaves with its exit code and says what was found, what is expected, and a fix.

A fix that is a command is given to the command's own parser, and one that is an option must be an option of the
command that was typed, or of the one that the fix names.
"""

import json
import re
import shutil

import click
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from PIL import Image

from tests.command_line import command_line
from vitdeploy.cli.main import COMMANDS, cli

SMALL = "vit_w32d2h2_patch8_32"

# What is typed (%B the bundle, %E the export, %C the checkpoint, %D the digits), the exit code, the code.
WALK = [
    # images
    ("predict %B absent.png", 2, "VD2002"),
    ("predict %B empty.png", 2, "VD2302"),
    ("predict %B cut.png", 2, "VD2302"),
    ("predict %B photo.heic", 2, "VD2302"),
    ("predict %B page.jpg", 2, "VD2302"),
    ("predict %B float.tiff", 2, "VD2302"),
    ("predict %B huge.png", 2, "VD2302"),
    ("predict %B no_images", 2, "VD2301"),
    ("predict %B empty_folder", 2, "VD2301"),
    ("predict %B *.webp", 2, "VD2002"),
    ("explain %B absent.png -o where.png", 2, "VD2002"),
    # recipes
    ("run absent.yaml", 2, "VD2002"),
    ("run not.yaml", 2, "VD2001"),
    ("run list.yaml", 2, "VD2001"),
    ("run r.yaml --set precison=int8", 2, "VD2001"),
    ("run r.yaml --set targets=[]", 2, "VD2001"),
    ("run r.yaml --set targets=[openvino-tpu]", 2, "VD2001"),
    ("run r.yaml --set precision=int3", 2, "VD2001"),
    ("run r.yaml --set source={}", 2, "VD2001"),
    ("run r.yaml --set data.path=absent", 2, "VD2002"),
    ("run r.yaml --set data.path=empty_folder", 2, "VD2301"),
    ("run r.yaml --set data.annotations=absent.json", 2, "VD2002"),
    ("run r.yaml --set source.labels=absent.txt", 2, "VD2002"),
    ("run r.yaml --set precision=bf16", 4, "VD4002"),
    ("run r.yaml -o mine", 2, "VD2003"),
    ("tune r.yaml --set source.model=resnet50", 2, "VD2101"),
    ("sweep r.yaml r.yaml", 2, "VD2000"),
    # models and checkpoints
    ("export resnet50 -o out", 2, "VD2101"),
    ("export vit_bas_patch16_224 -o out", 2, "VD2101"),
    ("export google/vit-base-patch16-224 -o out", 2, "VD2101"),
    ("export hf:./absent -o out", 2, "VD2002"),
    ("export -o out", 2, "VD2000"),
    ("export absent.onnx -o out", 2, "VD2002"),
    ("export %M --checkpoint absent.pt -o out", 2, "VD2002"),
    ("export %M --checkpoint empty_folder -o out", 2, "VD2002"),
    ("export %M --checkpoint empty.png -o out", 2, "VD2102"),
    ("export %M --checkpoint page.jpg -o out", 2, "VD2102"),
    ("export %M --checkpoint half.safetensors -o out", 2, "VD2102"),
    ("export vit_w64d2h2_patch8_32 --checkpoint %C -o out", 2, "VD2102"),
    ("export --checkpoint %C -o out", 2, "VD2102"),
    ("export %M --checkpoint %C --labels absent.txt -o out", 2, "VD2002"),
    ("export %M --image-size 33 -o out", 2, "VD2102"),
    # graphs
    ("compile absent.onnx --target onnxruntime-cpu -o out", 2, "VD2002"),
    ("compile empty_folder --target onnxruntime-cpu -o out", 2, "VD2002"),
    ("compile relu.onnx --target onnxruntime-cpu -o out", 2, "VD2202"),
    ("compile half.safetensors --target onnxruntime-cpu -o out", 2, "VD2202"),
    ("compile garbage.onnx --target onnxruntime-cpu -o out", 2, "VD2202"),
    ("optimize r.yaml -o out", 2, "VD2202"),
    ("inspect report.json", 2, "VD2202"),
    ("inspect empty.onnx", 2, "VD2202"),
    ("quantize %E --data no_images --target onnxruntime-cpu -o out", 2, "VD2301"),
    ("quantize %E --data %D --target openvino-cpu --precision fp8 -o out", 4, "VD4002"),
    # bundles
    ("predict empty_folder x.png", 2, "VD2002"),
    ("predict packed.vitb x.png", 2, "VD2002"),
    ("inspect %B --check --trust absent.pem", 2, "VD2002"),
    ("predict tampered good.png", 3, "VD3101"),
    ("predict outside good.png", 3, "VD3102"),
    ("embed %B --as cpp -o out", 2, "VD2402"),
    ("compare %B absent", 2, "VD2002"),
    # targets and devices
    ("compile %E --target openvino-tpu -o out", 2, "VD2402"),
    ("compile %E --target onnxruntime-cpu --precision fp16 -o out", 4, "VD4002"),
    ("predict %B good.png --target openvino-tpu", 2, "VD2402"),
    ("predict %B good.png --target openvino-cpu", 2, "VD2402"),
    ("inspect %E --target openvino-cpu", 2, "VD2402"),
    ("bench %B --on nowhere", 2, "VD2403"),
    ("devices doctor nowhere", 2, "VD2403"),
    ("devices remove nowhere", 2, "VD2403"),
    ("devices add pi 10.0.0.7", 2, "VD2403"),
]
# Where the message itself holds the fix: nothing could be said beside it.
COMPLETE = {"VD2001"}


@pytest.fixture(scope="module")
def place(tmp_path_factory, small_checkpoint, small_bundle, digits):
    """A folder with one of each."""
    home = tmp_path_factory.mktemp("walk")
    for name in ("no_images", "empty_folder", "mine"):
        (home / name).mkdir()
    (home / "no_images" / "a.heic").touch()
    (home / "mine" / "thesis.txt").touch()
    good = next(digits.glob("evaluation/3/*.png"))
    shutil.copy(good, home / "good.png")
    (home / "cut.png").write_bytes(good.read_bytes()[:60])
    (home / "photo.heic").write_bytes(b"\0\0\0\x20ftypheic\0\0")
    (home / "page.jpg").write_bytes(b"<!DOCTYPE html><html></html>")
    Image.fromarray(np.zeros((4, 4), np.float32)).save(home / "float.tiff")
    Image.new("1", (9000, 9000)).save(home / "huge.png")
    for name in ("empty.png", "empty.onnx"):
        (home / name).touch()
    (home / "not.yaml").write_text("a: [", encoding="utf-8")
    (home / "list.yaml").write_text("- a", encoding="utf-8")
    (home / "report.json").write_text("{}", encoding="utf-8")
    (home / "half.safetensors").write_bytes(small_checkpoint.read_bytes()[:5000])
    (home / "garbage.onnx").write_bytes(b"\x08garbage" * 50)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), home / "relu.onnx")
    recipe = {
        "vitdeploy": 1,
        "name": "walk",
        "source": {"model": SMALL, "checkpoint": str(small_checkpoint)},
        "preprocess": {"resize": 32, "crop": 32, "mean": [0.5], "std": [0.5]},
        "data": {"path": str(digits)},
        "targets": ["onnxruntime-cpu"],
    }
    (home / "r.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    shutil.copytree(small_bundle, home / "tampered")
    with (home / "tampered/engines/onnxruntime-cpu/graph.onnx").open("ab") as file:
        file.write(b"\0")
    shutil.copytree(small_bundle, home / "outside")
    manifest = home / "outside" / "manifest.json"
    text = manifest.read_text(encoding="utf-8").replace('"engines/onnxruntime-cpu/graph.onnx"', '"../secret"')
    manifest.write_text(text, encoding="utf-8")
    with command_line(home, home / "store") as run:
        assert run("bundle", "pack", small_bundle, "-o", "packed.vitb").returncode == 0
    return home


@pytest.fixture
def run(place, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(place / "config"))
    with command_line(place, place / "store") as run:
        yield run


def option_names(command: click.Command) -> set[str]:
    return {name for param in command.params for name in (*param.opts, *param.secondary_opts)}


def find_command(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that words call, and the words behind its name."""
    command = cli.get_command(click.Context(cli), words[0])
    rest = words[1:]
    if isinstance(command, click.Group):
        command, rest = command.commands[rest[0]], rest[1:]
    assert command is not None, words
    return command, rest


def commands_in(text: str) -> list[list[str]]:
    """The commands that a fix names, as words; text behind one begins with a comma, a semicolon or a known word."""
    found = re.findall(r"vitdeploy ((?:bundle |devices )?[a-z]+(?: [^`;,]*)?)", text)
    words = [re.split(r" (?:brings|shows?|says?|makes|asks|and|or) ", f"{each} ")[0].split() for each in found]
    return [each for each in words if each[0] in COMMANDS]


def check_mend(typed: click.Command, text: str) -> None:
    named = [typed]
    for words in commands_in(text):
        command, arguments = find_command(words)
        named.append(command)
        if "--help" not in arguments and arguments:
            command.make_context(words[0], [word.strip("'") for word in arguments])  # raises what the parser would
    for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text):
        assert any(option in option_names(command) or option in ("--help", "--json") for command in named), option


@pytest.mark.parametrize(("line", "exit_code", "code"), WALK, ids=[line for line, _, _ in WALK])
def test_a_bad_input_is_told_with_what_was_found_what_is_wanted_and_a_mend(
    run, place, small_bundle, small_export, small_checkpoint, digits, line, exit_code, code
):
    names = {"%B": small_bundle, "%E": small_export, "%C": small_checkpoint, "%D": digits, "%M": SMALL}
    arguments = [str(names.get(word, word)) for word in line.split()]
    before = sorted(place.rglob("*"))
    done = run(*arguments, "--json")
    assert done.returncode == exit_code, done.stderr
    error = json.loads(done.stdout)["error"]
    assert (error["code"], error["exit_code"]) == (code, exit_code)
    assert sorted(place.rglob("*")) == before
    told = error["message"] + error["found"] + error["expected"]
    assert error["fix"] or code in COMPLETE, error
    named = any(word.rpartition("=")[2].strip("[]{}").removeprefix("hf:") in told for word in arguments[1:])
    assert named or error["found"] or error["message"] == "no model given", told  # what was found
    assert len(done.stderr) < 1500
    check_mend(find_command(arguments)[0], f"{error['expected']} ; {error['fix']}")


def test_the_walk_is_of_sixty_inputs():
    assert len(WALK) >= 60
