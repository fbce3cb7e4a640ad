"""Checkpoint files: what loads, and what is refused with its reason."""

import argparse
import os
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from vitdeploy.errors import CheckpointError, MissingFileError, NonFiniteWeightsError, PickleError
from vitdeploy.models.architectures.vit import VisionTransformer
from vitdeploy.models.catalog import find_or_raise
from vitdeploy.models.checkpoints.fit import load_state
from vitdeploy.models.checkpoints.read import read_checkpoint
from vitdeploy.models.load import load_model
from vitdeploy.models.source import Source

MODEL = "vit_w16d2h2_patch8_16"
OLD_FORMAT = {"_use_new_zipfile_serialization": False}


@pytest.fixture
def state():
    torch.manual_seed(3)
    return VisionTransformer(find_or_raise(MODEL)[1]).state_dict()


class Shell:
    """Unpickling it runs a command."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def same(a, b):
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


# --- reading ----------------------------------------------------------------------------------------------------------


def test_safetensors_round_trip(tmp_path, state):
    save_file(state, tmp_path / "weights.safetensors")
    read, notes = read_checkpoint(tmp_path / "weights.safetensors")
    assert same(dict(sorted(read.items())), dict(sorted(state.items())))
    assert notes == ()


@pytest.mark.parametrize("options", [{}, OLD_FORMAT], ids=["zip", "old"])
def test_pt_round_trip(tmp_path, state, options):
    torch.save(state, tmp_path / "weights.pt", **options)
    read, notes = read_checkpoint(tmp_path / "weights.pt")
    assert same(read, state)
    assert notes == ()


def test_content_decides_and_not_the_name(tmp_path, state):
    save_file(state, tmp_path / "weights.pt")
    torch.save(state, tmp_path / "weights.safetensors")
    assert read_checkpoint(tmp_path / "weights.pt")[0].keys() == state.keys()
    assert read_checkpoint(tmp_path / "weights.safetensors")[0].keys() == state.keys()


@pytest.mark.parametrize("name", ["absent.safetensors", "."])
def test_a_missing_file_is_named(tmp_path, name):
    with pytest.raises(MissingFileError) as caught:
        read_checkpoint(tmp_path / name)
    assert str(tmp_path / name) in caught.value.message


def test_a_git_lfs_pointer_is_recognised(tmp_path):
    path = tmp_path / "weights.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123\n")
    with pytest.raises(CheckpointError, match="git-lfs pointer") as caught:
        read_checkpoint(path)
    assert caught.value.fix == "git lfs pull"


@pytest.mark.parametrize("kept", [9, 100, 0.5, 0.999])
def test_a_truncated_safetensors_file_is_refused(tmp_path, state, kept):
    path = tmp_path / "weights.safetensors"
    save_file(state, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole)) if isinstance(kept, float) else kept])
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        read_checkpoint(path)


def test_an_empty_file_is_called_that(tmp_path):
    (tmp_path / "weights.pt").touch()
    with pytest.raises(CheckpointError, match=r"weights\.pt is an empty file"):
        read_checkpoint(tmp_path / "weights.pt")


def test_a_file_of_another_kind_is_shown_by_its_beginning(tmp_path):
    (tmp_path / "weights.safetensors").write_text("<!DOCTYPE html><html>Not found</html>")
    with pytest.raises(CheckpointError, match="not a checkpoint that vitdeploy can read") as caught:
        read_checkpoint(tmp_path / "weights.safetensors")
    assert caught.value.found == "a file that begins with b'<!DOCTYPE html><html>Not'"
    assert "web page" in caught.value.fix


@pytest.mark.parametrize(
    ("files", "fix"),
    [
        (["config.json", "model.safetensors"], "use it as the model: hf:{}"),
        (["notes.txt", "epoch3.pth"], "name one of its files, such as {}/epoch3.pth"),
        ([], "check --checkpoint"),
    ],
)
def test_a_folder_is_answered_with_what_to_name(tmp_path, files, fix):
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(MissingFileError) as caught:
        read_checkpoint(tmp_path)
    assert (caught.value.found, caught.value.fix) == ("a folder", fix.format(tmp_path))


@pytest.mark.parametrize("start", [b"", b"PK\x03\x04", b"\x80"], ids=["bytes", "zip", "pickle"])
def test_random_bytes_are_refused(tmp_path, start):
    path = tmp_path / "weights.pt"
    path.write_bytes(start + bytes((i * 167 + 13) % 256 for i in range(4096)))
    with pytest.raises((CheckpointError, PickleError)):
        read_checkpoint(path)


@pytest.mark.parametrize("options", [{}, OLD_FORMAT], ids=["zip", "old"])
@pytest.mark.parametrize("kept", [64, 0.3, 0.9])
def test_a_truncated_pt_is_refused(tmp_path, state, options, kept):
    path = tmp_path / "weights.pt"
    torch.save(state, path, **options)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole)) if isinstance(kept, float) else kept])
    with pytest.raises(CheckpointError, match="not a complete PyTorch checkpoint") as caught:
        read_checkpoint(path)
    assert caught.value.found


@pytest.mark.parametrize("form", ["pickle", "zip", "old"])
@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors"])
def test_a_pickle_that_runs_code_is_refused_and_nothing_runs(tmp_path, form, name):
    witness = tmp_path / "witness"
    evil = {"head.weight": Shell(f"echo ran > '{witness}'")}
    if form == "pickle":
        (tmp_path / name).write_bytes(pickle.dumps(evil, protocol=2))
    else:
        torch.save(evil, tmp_path / name, **({} if form == "zip" else OLD_FORMAT))
    with pytest.raises(PickleError) as caught:
        read_checkpoint(tmp_path / name)
    assert not witness.exists()
    assert caught.value.exit_code == 3
    assert caught.value.found == f"{os.name if os.name == 'nt' else 'posix'}.system"
    assert "weights_only" not in str(caught.value)  # no advice on how to run it all the same


def test_the_witness_of_that_test_works(tmp_path):
    witness = tmp_path / "witness"
    data = pickle.dumps(Shell(f"echo ran > '{witness}'"), protocol=2)
    pickle.loads(data)  # noqa: TID251
    assert witness.exists()


def test_a_whole_module_is_refused_as_more_than_weights(tmp_path):
    torch.save(nn.Linear(2, 2), tmp_path / "model.pt")
    with pytest.raises(PickleError) as caught:
        read_checkpoint(tmp_path / "model.pt")
    assert caught.value.found == "torch.nn.modules.linear.Linear"


@pytest.mark.parametrize(("content", "found"), [([torch.ones(2)], "list"), (torch.ones(2), "Tensor")], ids=str)
def test_a_pickle_that_is_no_state_dict_says_what_it_holds(tmp_path, content, found):
    torch.save(content, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match="not a state dict") as caught:
        read_checkpoint(tmp_path / "weights.pt")
    assert caught.value.found == found


@pytest.mark.parametrize("options", [{}, OLD_FORMAT], ids=["zip", "old"])
def test_weights_are_taken_out_of_a_training_state_and_that_is_said(tmp_path, state, options):
    """The ways in which training scripts wrap a state dict are in test_unwrap.py: here it is a file."""
    training = {
        "epoch": 3,
        "args": argparse.Namespace(lr=1e-3),
        "model": {f"module.{name}": tensor.half() for name, tensor in state.items()},
    }
    torch.save(training, tmp_path / "weights.pt", **options)
    read, notes = read_checkpoint(tmp_path / "weights.pt")
    assert same(read, {name: tensor.half().float() for name, tensor in state.items()})
    assert notes == (
        "weights taken from 'model'; ignored: epoch, args",
        "prefix 'module.' dropped from all keys",
        "32 of 32 tensors converted from float16 to float32",
    )


def test_a_namespace_of_arguments_cannot_smuggle_code_in(tmp_path):
    witness = tmp_path / "witness"
    arguments = argparse.Namespace(hook=Shell(f"echo ran > '{witness}'"))
    torch.save({"model": {"w": torch.ones(2)}, "args": arguments}, tmp_path / "weights.pt")
    with pytest.raises(PickleError) as caught:
        read_checkpoint(tmp_path / "weights.pt")
    assert caught.value.found == "posix.system"
    assert not witness.exists()


def test_numpys_numbers_and_paths_beside_the_weights_are_values(tmp_path):
    beside = {"best": np.float64(71.5), "epoch": np.int64(3), "history": np.arange(3.0), "names": np.array(["a", "b"])}
    torch.save({"model": {"w": torch.ones(2)}, **beside, "out": tmp_path}, tmp_path / "weights.pt")
    state, notes = read_checkpoint(tmp_path / "weights.pt")
    assert torch.equal(state["w"], torch.ones(2))
    assert notes == ("weights taken from 'model'; ignored: best, epoch, history, names, out",)


def test_an_array_of_objects_cannot_smuggle_code_in(tmp_path):
    witness = tmp_path / "witness"
    array = np.array([Shell(f"echo ran > '{witness}'")], dtype=object)
    torch.save({"model": {"w": torch.ones(2)}, "names": array}, tmp_path / "weights.pt")
    with pytest.raises(PickleError, match="runs commands") as caught:
        read_checkpoint(tmp_path / "weights.pt")
    assert "do not open it" in caught.value.fix
    assert not witness.exists()


# --- loading ----------------------------------------------------------------------------------------------------------


def refusal(state):
    with pytest.raises(CheckpointError) as caught:
        load_state(VisionTransformer(find_or_raise(MODEL)[1]), state, "weights.pt")
    return caught.value.found


def test_missing_keys_are_told_by_what_they_have_in_common(state):
    without = {name: tensor for name, tensor in state.items() if not name.startswith("blocks.1.")}
    assert refusal(without) == "12 missing: blocks.1.*"
    less = {name: tensor for name, tensor in state.items() if ".norm" not in name}
    assert refusal(less) == "8 missing: blocks.{0-1}.norm1.*, blocks.{0-1}.norm2.*"


def test_unexpected_keys_are_counted_and_told_together(state):
    extra = {**{f"blocks.{i}.gate.weight": torch.zeros(1) for i in (0, 1, 2, 5, 6)}, "own.weight": torch.zeros(1)}
    assert refusal({**state, **extra}) == "6 unexpected: blocks.{0-2,5-6}.gate.weight, own.weight"


def test_tensors_too_many_are_told_to_be_left_out(state):
    with pytest.raises(CheckpointError) as caught:
        load_state(VisionTransformer(find_or_raise(MODEL)[1]), {**state, "head_aux.weight": torch.zeros(3)}, "w")
    assert (caught.value.found, caught.value.fix[:27]) == (
        "1 unexpected: head_aux.weight",
        "save the state dict without",
    )


def test_misshapen_tensors_are_listed_with_both_shapes(state):
    found = refusal({**state, "pos_embed": torch.zeros(1, 10, 16)})
    assert found == "1 with a different shape: pos_embed [1, 10, 16] (model: [1, 5, 16])"


def test_everything_that_does_not_fit_is_told_at_once(state):
    del state["norm.bias"]
    state["head.weight"], state["extra"] = torch.zeros(3, 16), torch.zeros(1)
    state["norm.weight"] = torch.zeros(16, dtype=torch.int8)
    parts = refusal(state).split("; ")
    assert parts == [
        "1 missing: norm.bias",
        "1 unexpected: extra",
        "1 with a different shape: head.weight [3, 16] (model: [1000, 16])",
        "1 with a different type: norm.weight int8 (model: float32)",
    ]


def loaded_notes(state, file="weights.pt"):
    model = VisionTransformer(find_or_raise(MODEL)[1])
    notes = load_state(model, state, file)
    assert all(torch.equal(tensor, own) for own, tensor in zip(model.state_dict().values(), plain(), strict=True))
    return notes


def plain():
    torch.manual_seed(3)
    return VisionTransformer(find_or_raise(MODEL)[1]).state_dict().values()


@pytest.mark.parametrize("prefix", ["net.backbone.", "student.", "module.model.", "a.0.b."])
def test_a_prefix_is_found_by_the_names_behind_it(state, prefix):
    notes = loaded_notes({f"{prefix}{name}": tensor for name, tensor in state.items()})
    assert notes == (f"prefix {prefix!r} dropped from all keys",)


def test_what_the_training_alone_needs_may_stand_beside_the_model(state):
    beside = {"net.criterion.weight": torch.ones(2), "n_averaged": torch.tensor(3), "total_ops": torch.zeros(1)}
    computed = {"net.embeddings.position_ids": torch.arange(3)}
    notes = loaded_notes({**{f"net.{name}": tensor for name, tensor in state.items()}, **beside, **computed})
    assert notes == (
        "using the tensors below 'net.'",
        "left out, computed by the model itself: embeddings.position_ids",
        "left out, used in training only: n_averaged, total_ops, criterion.weight",
    )


def test_two_parts_that_fit_are_refused_with_the_way_to_choose(state):
    twice = {f"{who}.{name}": tensor for who in ("student", "teacher") for name, tensor in state.items()}
    with pytest.raises(CheckpointError, match="holds several matching models") as caught:
        load_state(VisionTransformer(find_or_raise(MODEL)[1]), twice, "weights.pt")
    assert caught.value.found == "'student.' (32 tensors), 'teacher.' (32 tensors)"
    assert "save_part('weights.pt', 'student.', 'student.safetensors')" in caught.value.fix


def test_one_name_of_a_shared_tensor_is_enough_and_two_must_agree():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
            self.b.weight = self.a.weight

    weights = {"a.weight": torch.ones(2, 2), "a.bias": torch.ones(2), "b.bias": torch.ones(2)}
    tied = Tied()
    assert load_state(tied, weights, "w.pt") == ("shared with a.weight: b.weight",)
    assert torch.equal(tied.b.weight, torch.ones(2, 2))
    with pytest.raises(CheckpointError, match="different values") as caught:
        load_state(Tied(), {**weights, "b.weight": torch.zeros(2, 2)}, "w.pt")
    assert caught.value.found == "a.weight and b.weight"


def test_counters_of_batch_norm_may_be_absent():
    model = nn.Sequential(nn.BatchNorm2d(2))
    state = {name: torch.ones(2) for name in ("0.weight", "0.bias", "0.running_mean", "0.running_var")}
    told = "not in the checkpoint, computed by the model itself: 0.num_batches_tracked"
    assert load_state(model, state, "w.pt") == (told,)
    with pytest.raises(CheckpointError) as caught:
        load_state(model, {name: tensor for name, tensor in state.items() if "mean" not in name}, "w.pt")
    assert caught.value.found == "1 missing: 0.running_mean"


def test_what_was_learned_under_the_name_of_something_computed_may_not_be_absent():
    class Masked(nn.Module):
        def __init__(self, learned):
            super().__init__()
            self.a = nn.Linear(2, 2)
            if learned:
                self.attn_mask = nn.Parameter(torch.ones(2))
            else:
                self.register_buffer("attn_mask", torch.ones(2))

    state = {"a.weight": torch.ones(2, 2), "a.bias": torch.ones(2)}
    told = "not in the checkpoint, computed by the model itself: attn_mask"
    assert load_state(Masked(False), state, "w.pt") == (told,)
    with pytest.raises(CheckpointError) as caught:
        load_state(Masked(True), state, "w.pt")
    assert caught.value.found == "1 missing: attn_mask"


class Wrapped(nn.Module):
    """Its names begin as a wrapper's, and two of them are of one tensor."""

    def __init__(self):
        super().__init__()
        self.model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
        self.model["b"].weight = self.model["a"].weight


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"model.a.relative_position_index": torch.arange(3)}, "left out, computed by the model itself: model.a."),
        ({"model.b.weight": None}, "shared with model.a.weight: model.b.weight"),
    ],
)
def test_a_prefix_of_the_models_own_comes_back_though_not_all_names_are_there(change, note, tmp_path):
    state = {name: torch.randn_like(tensor) for name, tensor in Wrapped().state_dict().items()}
    state["model.b.weight"] = state["model.a.weight"].clone()
    torch.save({name: tensor for name, tensor in (state | change).items() if tensor is not None}, tmp_path / "w.pt")
    read, _ = read_checkpoint(tmp_path / "w.pt")
    assert "a.weight" in read  # the reader took the prefix for a wrapper's
    model = Wrapped()
    [found] = load_state(model, read, "w.pt")
    assert found.startswith(note)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_a_refused_checkpoint_leaves_the_model_as_it_was(state):
    model = VisionTransformer(find_or_raise(MODEL)[1])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError):
        load_state(model, {**state, "extra": torch.zeros(1)}, "weights.pt")
    assert same(before, model.state_dict())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name_and_count(state, value):
    state["blocks.1.mlp.fc2.weight"].view(-1)[:3] = value
    with pytest.raises(NonFiniteWeightsError) as caught:
        load_state(VisionTransformer(find_or_raise(MODEL)[1]), state, "weights.pt")
    assert "blocks.1.mlp.fc2.weight" in caught.value.message
    assert caught.value.found == "3 of 1024 values are NaN or infinite"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_weights_load_as_float32(tmp_path, state, dtype):
    half = {name: tensor.to(dtype) for name, tensor in state.items()}
    save_file(half, tmp_path / "half.safetensors")
    original = load_model(Source(MODEL, tmp_path / "half.safetensors"))
    loaded = original.module.state_dict()
    assert {tensor.dtype for tensor in loaded.values()} == {torch.float32}
    assert same(loaded, {name: tensor.float() for name, tensor in half.items()})
    assert f"32 of 32 tensors converted from {str(dtype)[6:]} to float32" in original.notes


def test_load_original_takes_classes_and_channels_from_the_file(tmp_path, state):
    state["head.weight"], state["head.bias"] = torch.ones(4, 16), torch.ones(4)
    state["patch_embed.proj.weight"] = torch.ones(16, 1, 8, 8)
    save_file(state, tmp_path / "weights.safetensors")
    original = load_model(Source(MODEL, tmp_path / "weights.safetensors"))
    assert (original.classes, original.signature.channels) == (4, 1)
    assert not original.module.training
    assert original.parameters == sum(tensor.numel() for tensor in state.values())
    assert original.module(torch.zeros(2, 1, 16, 16)).shape == (2, 4)


def test_a_checkpoint_of_another_patch_size_than_its_name_says_is_refused(tmp_path, state):
    save_file(state, tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError, match="is not a checkpoint of vit_w16d2h2_patch4_16") as caught:
        load_model(Source("vit_w16d2h2_patch4_16", tmp_path / "weights.safetensors"))
    assert caught.value.found == "patch size 8 instead of 4"
