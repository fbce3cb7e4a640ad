"""Files, folders and state dicts that are no checkpoints of a whole model: each is named, with the way out."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import re
import shlex
import timeit
import zipfile
from tarfile import TarInfo  # noqa: TID251
from tarfile import open as open_tar  # noqa: TID251

import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from vitdeploy.errors import CheckpointError, InputError, MissingFileError, PickleError
from vitdeploy.models.checkpoints.read import read_checkpoint, save_part

WEIGHT = torch.ones(2, 2)


def refused(path, kind=CheckpointError):
    with pytest.raises(kind) as caught:
        read_checkpoint(path)
    return caught.value


@pytest.mark.parametrize(
    ("content", "what", "fix"),
    [
        (b"\x89HDF\r\n\x1a\n" + bytes(80), "an HDF5 file", "export it to ONNX"),
        (b"GGUF" + bytes(80), "a GGUF file", "as .safetensors"),
        (gzip.compress(bytes(800), mtime=0), "compressed with gzip", "gunzip it"),
        (b"\xfd7zXZ\x00" + bytes(80), "compressed with xz", "unxz it"),
        (b"\x28\xb5\x2f\xfd" + bytes(80), "compressed with zstd", "unzstd it"),
        (b"\x08\x0a\x12\x07pytorch" + bytes(80), "an ONNX file", "vitdeploy export {} -o exported"),
    ],
    ids=["hdf5", "gguf", "gzip", "xz", "zstd", "onnx"],
)
def test_a_file_of_another_kind_is_named(content, what, fix, tmp_path):
    path = tmp_path / "weights.pt"
    path.write_bytes(content)
    error = refused(path)
    assert what in error.message
    assert fix.format(path) in error.fix


def test_an_onnx_file_as_the_library_writes_it_is_one(tmp_path):
    graph = onnx.helper.make_graph([], "g", [], [])
    for name in ("pytorch", ""):
        onnx.save(onnx.helper.make_model(graph, producer_name=name), tmp_path / "weights.pt")
        assert "is an ONNX file" in refused(tmp_path / "weights.pt").message


def test_a_zip_of_other_files_and_an_exported_program_are_named(tmp_path):
    with zipfile.ZipFile(tmp_path / "release.zip", "w") as archive:
        archive.writestr("release/weights.pth", b"...")
    error = refused(tmp_path / "release.zip")
    assert ("a zip archive, not a checkpoint" in error.message, error.found) == (True, "release/weights.pth")
    with zipfile.ZipFile(tmp_path / "model.pt2", "w") as archive:
        archive.writestr("model/models/model.json", b"{}")
    error = refused(tmp_path / "model.pt2")
    assert "an archive of torch.export" in error.message
    assert "load" not in error.fix


@pytest.mark.parametrize(
    ("made", "what", "fix"),
    [
        (["zero_to_fp32.py", "latest"], "a DeepSpeed checkpoint", "python zero_to_fp32.py . fp32"),
        (["global_step10/mp_rank_00_model_states.pt"], "a DeepSpeed checkpoint", "python zero_to_fp32.py . fp32"),
        ([".metadata", "__0_0.distcp"], "torch.distributed (FSDP)", "format_utils dcp_to_torch {} weights.pt"),
        (["adapter_config.json", "adapter_model.safetensors"], "an adapter (LoRA)", "merge_and_unload()"),
    ],
)
def test_a_folder_of_several_processes_or_of_an_adapter_is_named(made, what, fix, tmp_path):
    for name in made:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    error = refused(tmp_path)
    assert what in error.message
    assert fix.format(tmp_path) in error.fix


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        (["base_model.model.blocks.0.attn.qkv.lora_A.weight", "x"], "an adapter (LoRA)"),
        (["blocks.0._flat_param", "x"], "flattened by FSDP"),
        (["blocks.0.attn.qkv.SCB", "x"], "already quantised"),
        (["blocks.0.attn.qkv.weight_mask", "blocks.0.attn.qkv.weight_orig"], "being pruned"),
    ],
)
def test_a_state_dict_that_is_no_whole_float_models_is_named(keys, what, tmp_path):
    save_file({key: WEIGHT.clone() for key in keys}, tmp_path / "w.safetensors")
    error = refused(tmp_path / "w.safetensors")
    assert what in error.message
    assert keys[0] in error.found
    assert error.fix


def test_tensors_without_numbers_are_those_of_deepspeed(tmp_path):
    torch.save({"module": {"a.weight": torch.zeros(0), "a.bias": torch.zeros(0)}}, tmp_path / "mp_rank_00.pt")
    error = refused(tmp_path / "mp_rank_00.pt")
    assert "tensor names, but no values" in error.message
    assert "zero_to_fp32.py" in error.fix


def test_several_state_dicts_are_answered_with_a_command_that_takes_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {"generator": {"w": WEIGHT}, "discriminator": {"w": WEIGHT + 1}}}, "gan.pt")
    error = refused(tmp_path / "gan.pt")
    assert error.found == "'generator', 'discriminator'"
    exec(shlex.split(error.fix)[-1], {})  # noqa: S102
    assert torch.equal(read_checkpoint(tmp_path / "weights.pt")[0]["w"], WEIGHT)


class Hyperparameters:
    """What no restricted reader takes."""


STATE = {"a.weight": WEIGHT, "a.bias": WEIGHT[0]}


@pytest.mark.parametrize("beside", [Hyperparameters(), range(3), slice(2), int])
def test_the_way_out_of_a_pickle_of_more_than_weights_does_not_read_it(beside, tmp_path):
    torch.save({"state_dict": STATE, "hyper_parameters": {"ema": 0.999}, "args": beside}, tmp_path / "last.ckpt")
    error = refused(tmp_path / "last.ckpt", PickleError)
    assert "holds more than plain weights" in error.message
    assert "torch.save(model.state_dict(), 'weights.pt')" in error.fix
    assert "load" not in error.fix and "last.ckpt" not in error.fix


class Calls:
    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


def in_tar(value, path):
    """As PyTorch before 0.2: members that are pickles."""
    with open_tar(path, "w") as made:
        for name, data in (("sys_info", {}), ("pickle", value), ("tensors", 0), ("storages", 0)):
            content = pickle.dumps(data, 2)
            member = TarInfo(name)
            member.size = len(content)
            made.addfile(member, io.BytesIO(content))


SAVED = {
    "zip": torch.save,
    "old": lambda value, path: torch.save(value, path, _use_new_zipfile_serialization=False),
    "bare": lambda value, path: path.write_bytes(pickle.dumps(value, 4)),
    "tar": in_tar,
}


@pytest.mark.parametrize("form", SAVED)
@pytest.mark.parametrize(("call", "name"), [(exec, "exec"), (os.system, "system"), (timeit.timeit, "timeit.timeit")])
def test_what_a_pickle_calls_is_named_in_every_format(form, call, name, tmp_path):
    witness, path = tmp_path / "witness", tmp_path / "$(touch witness) model.pt"
    SAVED[form]({"model": {}, "hook": Calls(call, f"open({str(witness)!r}, 'w')")}, path)
    error = refused(path, PickleError)
    assert name in error.found and "runs commands when it is read" in error.message
    assert error.fix.startswith("do not open it") and "weights_only" not in str(error)
    assert not witness.exists()


def test_a_tar_archive_without_pickles_is_none(tmp_path):
    with open_tar(tmp_path / "photos.tar", "w") as made:
        made.addfile(TarInfo("a.jpg"), io.BytesIO(b""))
    assert "not a checkpoint that vitdeploy can read" in refused(tmp_path / "photos.tar").message


@pytest.mark.parametrize(
    "make",
    [
        lambda path: torch.save({"model": {key: {"w": WEIGHT} for key in ("$(touch a)", "b")}}, path),
        lambda path: path.write_bytes(b"\x08\x09\x12\x00" + bytes(64)),
        lambda path: (path.mkdir(), (path / "config.json").touch()),
        lambda path: (path.mkdir(), save_file({"w": WEIGHT}, path / "w.safetensors")),
    ],
    ids=["several state dicts", "ONNX", "a folder with config.json", "a folder"],
)
def test_a_name_runs_nothing_where_the_fix_is_pasted(make, tmp_path):
    path = tmp_path / "'$(touch b)' `c`"
    make(path)
    error = refused(path, InputError)
    assert path.name in "".join(shlex.split(error.fix))
    outside = re.sub(r"'[^']*'", "", error.fix.replace("'\"'\"'", ""))  # a quote inside of quotes
    assert "$" not in outside and "`" not in outside


@pytest.mark.parametrize("call", [eval, exec, compile, open, getattr, __import__, breakpoint])
def test_a_pickle_with_what_runs_code_is_not_to_be_opened(call, tmp_path):
    torch.save({"model": STATE, "hook": call}, tmp_path / "last.ckpt")
    error = refused(tmp_path / "last.ckpt", PickleError)
    assert "runs commands when it is read" in error.message
    assert "do not open it" in error.fix


class ShardedThing:
    __module__ = "torch.distributed"

    def __reduce__(self):
        return ShardedThing, ()


@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}], ids=["zip", "old"])
def test_a_whole_module_is_named_in_both_formats(options, tmp_path):
    torch.save(nn.Sequential(nn.Linear(2, 2)), tmp_path / "model.pt", **options)
    error = refused(tmp_path / "model.pt", PickleError)
    assert "a whole pickled module" in error.message
    assert "torch.nn.modules" in error.found
    assert "--model my_model:build" in error.fix


def test_a_part_of_a_distributed_checkpoint_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.distributed, "ShardedThing", ShardedThing, raising=False)
    torch.save({"w": ShardedThing()}, tmp_path / "rank0.pt")
    error = refused(tmp_path / "rank0.pt", PickleError)
    assert "one part of a sharded training checkpoint" in error.message
    assert error.found == "torch.distributed.ShardedThing"


def test_a_part_is_saved_as_a_checkpoint_of_its_own(tmp_path):
    torch.save({"state_dict": {"a.w": WEIGHT, "b.w": WEIGHT + 1, "b.u": WEIGHT}}, tmp_path / "both.ckpt")
    save_part(str(tmp_path / "both.ckpt"), "b.", str(tmp_path / "b.safetensors"))
    assert sorted(load_file(tmp_path / "b.safetensors")) == ["u", "w"]
    with pytest.raises(CheckpointError, match=r"no tensors below 'c\.'"):
        save_part(str(tmp_path / "both.ckpt"), "c.", str(tmp_path / "c.safetensors"))


def test_one_file_of_several_stands_for_all_of_them(tmp_path):
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for number, name in enumerate(names):
        save_file({f"w{number}": WEIGHT}, tmp_path / name)
    with pytest.raises(CheckpointError, match="one part of a sharded checkpoint without an index"):
        read_checkpoint(tmp_path / names[0])
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {f"w{number}": name for number, name in enumerate(names)}}))
    for path in (index, *(tmp_path / name for name in names)):
        assert sorted(read_checkpoint(path)[0]) == ["w0", "w1"]
    (tmp_path / names[1]).unlink()
    with pytest.raises(MissingFileError, match="1 of 2 weight files are missing from"):
        read_checkpoint(index)
