"""docs/results/compatibility/checkpoints.md: twenty ways in which checkpoints are saved, and what becomes of each.

Each row is written by the real library on a tiny seeded model; what is loaded answers as that model does, and what is
refused is tried again as the fix says, where the fix is a command or an edit.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import types
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.compatibility_page import Page
from tests.models.test_load_folders import LABELS, SHAPE, VIT, difference, folder_of, image, of_classes, randomised
from tests.references import reference
from vitdeploy.errors import VitdeployError
from vitdeploy.models.load import load_model
from vitdeploy.models.source import Source

BUILT_IN = "vit_w32d2h4_patch8_32"
HEAD = """# Checkpoints

What vitdeploy does with checkpoints that other libraries save. *Loaded*: the outputs equal those of the saved module
within 1e-5 of the largest. Otherwise the row has the error code, the exit code and the fix, which the test followed.
`NAME` is a built-in model name. `tests/compatibility/test_checkpoints.py` writes this page.

- Missing, unexpected or misshapen tensors are one error that lists all of them. So is a `config.json` that contradicts
  the weights.
- Exceptions: tensors that a module computes itself (`position_ids`, `relative_position_index`, `attn_mask`), counters
  (`num_batches_tracked`), second names of shared tensors, and parts for training (losses, metrics, self-supervised
  heads). Notes of `vitdeploy export` and the report list what was left out.
- vitdeploy recognises any prefix. A checkpoint without a classifier gives features.
"""
ROWS = (
    "timm: `state_dict()` as safetensors",
    "timm: `train.py`'s file, with EMA",
    "timm: `save_for_hf`, with WordNet ids",
    "transformers: `save_pretrained`, twelve classes",
    "transformers: weights beside config.json",
    "transformers: index of several weight files",
    "transformers: another class, `.pth` beside config.json",
    "Lightning: `net.backbone.` and a loss",
    "self-supervised: `student.` and `teacher.` in one state dict",
    "DINO: containers `student` and `teacher`",
    "DistributedDataParallel around `torch.compile`",
    "FSDP and activation checkpointing, float16",
    "torchvision: `state_dict()` in bfloat16",
    "`torch.optim.swa_utils.AveragedModel`",
    "a backbone and a separate head",
    "`torch.jit.save`",
    "`torch.save(model)`: a whole module",
    "Lightning with OmegaConf in `hyper_parameters`",
    "transformers: config.json of three layers, weights of two",
    "`torch.distributed.checkpoint`: one file per process",
)
PAGE = Page("checkpoints", HEAD, ("saved as", "given as", "result"), ROWS)


@dataclass(frozen=True)
class Saved:
    """A checkpoint: how it is given, the answers that it must have, and what a loaded one is to say of itself."""

    source: Source
    answer: torch.Tensor
    labels: tuple[str, ...] = ()


def timm_model(**arguments):
    return randomised(reference("timm").create_model("vit_base_patch16_224", num_classes=5, **VIT, **arguments))


def answered(model):
    with torch.no_grad():
        found = model(image())
    return found if isinstance(found, torch.Tensor) else found.logits


def below(prefix, state):
    return {prefix + key: tensor for key, tensor in state.items()}


def alone(name, **more):
    return Source(checkpoint=Path(name), **more)


def timm_state():
    model = timm_model()
    save_file(model.state_dict(), "model.safetensors", {"epoch": "3", "format": "pt"})
    return Saved(Source(BUILT_IN, Path("model.safetensors")), answered(model))


def timm_training():
    model, averaged = timm_model(), timm_model()
    with torch.no_grad():
        averaged.head.bias.add_(1)
    arguments = argparse.Namespace(model="vit", lr=np.float64(1e-3), output=Path("out"))
    torch.save(
        {
            "epoch": 3,
            "arch": "vit",
            "state_dict": model.state_dict(),
            "state_dict_ema": averaged.state_dict(),
            "optimizer": {"state": {0: torch.zeros(2)}},
            "args": arguments,
            "metric": np.float64(71.5),
            "history": np.arange(3),
        },
        "model_best.pth.tar",
    )
    return Saved(Source(BUILT_IN, Path("model_best.pth.tar")), answered(averaged))


def timm_folder():
    model = timm_model()
    ids = [f"n0000000{number}" for number in range(5)]
    model.pretrained_cfg |= {"input_size": (3, 32, 32), "crop_pct": 1.0, "num_classes": 5}
    described = {"label_names": ids, "label_descriptions": dict(zip(ids, LABELS.values(), strict=True))}
    hub = __import__("timm.models._hub", fromlist=["save_for_hf"])
    hub.save_for_hf(model, "folder", model_config=described, model_args=VIT)
    labels = tuple(f"{wnid} {name}" for wnid, name in described["label_descriptions"].items())
    return Saved(Source("hf:folder"), answered(model), labels)


def transformers_vit(**more):
    library = reference("transformers")
    return randomised(library.ViTForImageClassification(of_classes(library, "ViT", **more)))


def twelve():
    library = reference("transformers")
    names = {number: f"kind {number}" for number in range(12)}
    config = library.ViTConfig(**SHAPE, id2label=names, label2id={name: i for i, name in names.items()})
    model = randomised(library.ViTForImageClassification(config))
    folder_of(model, {"size": {"height": 32, "width": 32}}, Path("folder"))
    # As a file keeps them: in the order of text.
    path = Path("folder/config.json")
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "id2label": dict(sorted(config["id2label"].items()))}))
    return Saved(Source("hf:folder"), answered(model), tuple(names.values()))


def file_beside():
    model = transformers_vit()
    model.save_pretrained("folder")
    return Saved(alone("folder/model.safetensors"), answered(model), tuple(LABELS.values()))


def index_of_shards():
    model = transformers_vit()
    model.save_pretrained("folder", max_shard_size="30KB")
    return Saved(alone("folder/model.safetensors.index.json"), answered(model), tuple(LABELS.values()))


def not_ours():
    library = reference("transformers")
    model = randomised(library.ViTMSNForImageClassification(of_classes(library, "ViTMSN")))
    model.config.save_pretrained("folder")
    config = json.loads(Path("folder/config.json").read_text())
    Path("folder/config.json").write_text(json.dumps({**config, "architectures": [type(model).__name__]}))
    torch.save({"model": model.state_dict(), "epoch": 3}, "folder/epoch3.pth")
    return Saved(alone("folder/epoch3.pth"), answered(model), tuple(LABELS.values()))


def lightning():
    model = timm_model()
    state = below("net.backbone.", model.state_dict()) | {"net.criterion.weight": torch.ones(5)}
    torch.save({"state_dict": state, "global_step": 7, "hyper_parameters": {"lr": 0.1}, "callbacks": {}}, "last.ckpt")
    return Saved(Source(BUILT_IN, Path("last.ckpt")), answered(model))


def student_and_teacher():
    model = timm_model()
    state = below("student.", model.state_dict()) | below("teacher.", timm_model().state_dict())
    torch.save({"state_dict": state}, "last.ckpt")
    return Saved(Source(BUILT_IN, Path("last.ckpt")), answered(model))


def dino():
    teacher = timm_model()
    heads = {"module.head.mlp.0.weight": torch.ones(2, 2), "module.head.last_layer.weight_g": torch.ones(2)}
    states = {
        who: below("module.backbone.", model.state_dict()) | heads
        for who, model in (("student", timm_model()), ("teacher", teacher))
    }
    torch.save({**states, "epoch": 3, "dino_loss": {"center": torch.zeros(1)}}, "checkpoint0100.pth")
    return Saved(Source(BUILT_IN, Path("checkpoint0100.pth")), answered(teacher))


def compiled():
    model = timm_model()
    torch.save({"model": below("module.", torch.compile(model).state_dict())}, "model.pth")
    return Saved(Source(BUILT_IN, Path("model.pth")), answered(model))


def wrapped():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = timm_model().half()
    state = model.state_dict()
    for number in range(2):
        model.blocks[number].mlp = checkpoint_wrapper(model.blocks[number].mlp)
    # The wrapper itself takes its name out of a state dict; a script that names parameters by hand keeps it.
    names = dict(model.named_parameters())
    assert any("_checkpoint_wrapped_module" in name for name in names)
    torch.save({f"_fsdp_wrapped_module.{name}": tensor.data for name, tensor in names.items()}, "full.pt")
    plain = timm_model()
    plain.load_state_dict(state)
    return Saved(Source(BUILT_IN, Path("full.pt")), answered(plain))


def torchvision_half():
    library = reference("torchvision")
    model = randomised(library.models.VisionTransformer(32, 8, 2, 4, 32, 48, num_classes=5)).bfloat16()
    torch.save(model.state_dict(), "vit.pth")
    return Saved(alone("vit.pth", heads=4), answered(model.float()))


def averaged():
    model = timm_model()
    torch.save(torch.optim.swa_utils.AveragedModel(model).state_dict(), "swa.pt")
    return Saved(Source(BUILT_IN, Path("swa.pt")), answered(model))


def own_head():
    model = reference("timm").create_model("vit_base_patch16_224", num_classes=0, **VIT)
    state = below("backbone.", randomised(model).state_dict())
    torch.save({"state_dict": state | {"classifier.1.weight": torch.ones(3, 32)}}, "last.ckpt")
    return Saved(Source(BUILT_IN, Path("last.ckpt")), answered(model))


def torchscript():
    model = timm_model()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of constants in timm's checks of sizes
        torch.jit.save(torch.jit.trace(model, image(), check_trace=False), "model.pt")
    return Saved(Source(BUILT_IN, Path("model.pt")), answered(model))


def whole_module():
    model = timm_model()
    torch.save(model, "model.pth")
    return Saved(alone("model.pth", image_size=(32, 32)), answered(model))


def omegaconf():
    model = timm_model()
    config = sys.modules["omegaconf.dictconfig"].DictConfig()
    content = {"state_dict": model.state_dict(), "epoch": 3, "hyper_parameters": config}
    torch.save(content, "last.ckpt")
    return Saved(Source(BUILT_IN, Path("last.ckpt")), answered(model))


def three_layers():
    model = transformers_vit()
    model.save_pretrained("folder")
    path = Path("folder/config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 3}))
    return Saved(Source("hf:folder"), answered(model), tuple(LABELS.values()))


def distributed():
    from torch.distributed import checkpoint

    model = timm_model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is one process
        checkpoint.save(model.state_dict(), checkpoint_id="step3", no_dist=True)
    return Saved(Source(BUILT_IN, Path("step3")), answered(model))


# How each row is saved, what the loaded original or the refusal says, and the row's text for the page.
SAVE_WEIGHTS = "save only the weights, `torch.save(model.state_dict(), ...)`"
CASES = dict(
    zip(
        ROWS,
        (
            (timm_state, "2 blocks of width 32", "sizes and classes from the weights"),
            (timm_training, "weights taken from 'state_dict_ema'", "weights from `state_dict_ema`; the rest ignored"),
            (timm_folder, "labels: n00000000 cat", "labels with WordNet ids"),
            (twelve, "labels: kind 0 ... kind 10, kind 11", "labels in numeric order"),
            (file_beside, "configuration from folder/config.json", "as config.json says"),
            (index_of_shards, "configuration from folder/config.json", "as config.json says"),
            (not_ours, "exported from transformers", "exported from transformers' own module"),
            (lightning, "using the tensors below 'net.backbone.'", "weights below `net.backbone.`"),
            (student_and_teacher, "typed", "save one part, with the printed command"),
            (dino, "weights taken from 'teacher'", "weights from `teacher`"),
            (compiled, "prefix 'module._orig_mod.' dropped", "prefix `module._orig_mod.` dropped"),
            (wrapped, "wrapper names dropped", "wrapper names dropped"),
            (torchvision_half, "converted from bfloat16", "converted to float32"),
            (averaged, "using the tensors below 'module.'", "weights below `module.`"),
            (own_head, "typed", "save the backbone, or give `--model package.module:function`"),
            (torchscript, "saved again", SAVE_WEIGHTS),
            (whole_module, "saved again", f"{SAVE_WEIGHTS}, and load them in a function for `--model`"),
            (omegaconf, "saved again", SAVE_WEIGHTS),
            (three_layers, "edited", "use files of one save, or correct config.json"),
            (distributed, "typed", "convert with PyTorch's `dcp_to_torch`"),
        ),
        strict=True,
    )
)


def given(source):
    return " ".join(
        filter(
            None,
            (
                source.model and f"`{source.model}`".replace(BUILT_IN, "NAME"),
                source.checkpoint and f"`--checkpoint {source.checkpoint}`",
                source.heads and f"`--heads {source.heads}`",
                source.image_size and f"`--image-size {source.image_size[0]}`",
            ),
        )
    )


def assert_answers(original, saved):
    found = original.module(image())
    found = found if isinstance(found, torch.Tensor) else found[0]
    assert difference(found.detach(), saved.answer) < 1e-5
    assert original.labels == saved.labels


def follow(fix, how, source):
    """Do what the fix says; the source that is then to be given."""
    if how == "edited":
        edit = json.loads("{" + fix.partition("in config.json: ")[2] + "}")
        path = Path("folder/config.json")
        path.write_text(json.dumps({**json.loads(path.read_text()), **edit}))
        return source
    if how == "saved again":
        exec(re.search(r"torch\.save\(.*?\)\)?(?=;|$)", fix)[0], {"torch": torch, "model": timm_model()})  # noqa: S102
        return Source(BUILT_IN, Path("weights.pt"))
    command = shlex.split(fix[fix.index("python -") :].partition("; else")[0].partition("; then")[0])
    if command[1] == "-c":
        exec(compile(command[2], "<fix>", "exec"), {})  # noqa: S102
        [written] = [path for path in Path().iterdir() if path.stem in ("weights", "student", "backbone")]
        return Source(source.model, written)
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    assert command[1:4] == ["-m", "torch.distributed.checkpoint.format_utils", "dcp_to_torch"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(command[4], command[5])
    return Source(source.model, Path(command[5]))


@pytest.fixture(autouse=True)
def named_as_omegaconf(monkeypatch):
    """To see what a pickle names a class of that name is enough; the library is not installed for this."""
    package, module = types.ModuleType("omegaconf"), types.ModuleType("omegaconf.dictconfig")
    module.DictConfig = type("DictConfig", (), {"__module__": module.__name__})
    package.dictconfig = module
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.parametrize("name", ROWS)
def test_checkpoint(name, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    make, told, shown = CASES[name]
    saved = make()
    try:
        original = load_model(saved.source)
    except VitdeployError as error:
        assert told in ("typed", "edited", "saved again"), error
        assert_answers(load_model(follow(error.fix, told, saved.source)), saved)
        result = f"{error.code}, exit {error.exit_code}: {shown}"
    else:
        assert_answers(original, saved)
        if told.startswith("labels: "):
            assert told.removeprefix("labels: ").split(", ")[-1] in original.labels
        else:
            assert sum(told in note for note in original.notes) == 1
        result = f"loaded as {original.family}: {shown}"
    PAGE.check((name, given(saved.source), result), write=request.config.getoption("--write-compatibility"))
