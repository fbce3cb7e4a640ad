"""Read a checkpoint file into a state dict.

The first bytes of a file determine its format, never its name. A `.pt`/`.pth` is a pickle: it is read only with
PyTorch's restricted unpickler (`weights_only=True`), with no fallback.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from vitdeploy.errors import CheckpointError, MissingFileError, quoted
from vitdeploy.limits import bounded, size_of
from vitdeploy.models.checkpoints import prefixes, unsupported
from vitdeploy.models.checkpoints.npz import is_npz, read_npz
from vitdeploy.models.checkpoints.pickles import is_tar, read_pickle, refuse_tar
from vitdeploy.models.checkpoints.safetensors_header import check_header
from vitdeploy.models.checkpoints.shards import files_of, require_checkpoint
from vitdeploy.models.checkpoints.unwrap import unwrap
from vitdeploy.paths import is_dir, is_file, not_utf8

_ZIP, _PICKLE, _LFS = b"PK\x03\x04", b"\x80", b"version https://git-lfs"
MAX_HEADER = 100 << 20  # bytes, the safetensors library's own limit: what is longer is no such file
SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".npz", ".ckpt")
FORMATS = "a .safetensors file, a .pt/.pth with a state dict, or JAX's .npz"


def read_checkpoint(path: Path, *shards: Path) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The state dict in a safetensors file, a `.pt`/`.pth` of plain weights, or a `.npz` of JAX, in float32.

    With `shards`, which hold the rest of one state dict: of all of them together, so that prefixes are seen as a whole.
    Also returns what was chosen, dropped or converted on the way (see `unwrap`), one per line.

    Raises:
        MissingFileError: no such file.
        PickleError: a pickle that holds more than plain weights.
        CheckpointError: not a checkpoint, truncated, without one state dict, or not of a whole float model.
    """
    state, notes = read_tensors(path, *shards)
    unsupported.refuse_state(str(path), state)
    return state, notes


def read_tensors(path: Path, *shards: Path) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """`read_checkpoint` without a look at what the tensors are of: a module of the user's own may be of that kind."""
    if not shards:
        path, *shards = files_of(path)  # type: ignore[assignment]
    with bounded(f"read {path.name}", size_of(path, *shards)):
        loaded = _loaded(path)
        if shards:
            parts = [loaded, *map(_loaded, shards)]
            loaded = {key: value for part in parts if isinstance(part, Mapping) for key, value in part.items()}
        try:
            return unwrap(loaded, str(path))
        except CheckpointError as error:
            said = f"{path}: {error.message}"
            raise CheckpointError(said, found=error.found, wanted=error.wanted, fix=error.fix) from None


def class_names(path: Path) -> tuple[str, ...]:
    """The names of classes in the arguments of training beside the weights (`args.class_names`); () where none are."""
    loaded = _loaded(path)
    arguments = loaded.get("args") if isinstance(loaded, Mapping) else None
    named = arguments if isinstance(arguments, Mapping) else getattr(arguments, "__dict__", {})
    names = named.get("class_names")
    return tuple(names) if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names) else ()


def _loaded(path: Path) -> object:
    if is_dir(path):
        unsupported.refuse_folder(path)
        raise MissingFileError(
            f"no checkpoint at {path}", found="a folder", wanted="a file with weights", fix=_of_folder(path)
        )
    require_checkpoint(path)
    with path.open("rb") as file:
        start = file.read(512)
    if not start:
        raise CheckpointError(f"{path} is an empty file", wanted=FORMATS, fix="get it again")
    if start.startswith(_LFS):
        raise CheckpointError(f"{path} is a git-lfs pointer, not the weights", fix="git lfs pull")
    if _is_safetensors(start):
        return _read_safetensors(path)
    if start.startswith(_ZIP) and is_npz(path):
        return read_npz(path)
    if start.startswith(_ZIP):
        unsupported.refuse_archive(path)
    if start.startswith((_ZIP, _PICKLE)):
        return read_pickle(path)
    if is_tar(start):
        refuse_tar(path)
    unsupported.refuse_beginning(path, start)
    raise CheckpointError(
        f"{path} is no checkpoint that vitdeploy can read",
        found=f"a file that begins with {start[:24]!r}",
        wanted=FORMATS,
        fix="look at the file: a download may have been answered with a web page",
    )


def _of_folder(path: Path) -> str:
    if is_file(path / "config.json"):
        return f"give it as the model: {quoted(f'hf:{path}')}"
    files = sorted(entry.name for entry in path.iterdir() if entry.suffix in SUFFIXES)
    return f"name one of its files, such as {quoted(path / files[0])}" if files else "check --checkpoint"


def _is_safetensors(start: bytes) -> bool:
    """Eight bytes of the length of a header, which is JSON: by the first alone it may be taken for a pickle."""
    return start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= MAX_HEADER


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load, load_file

    check_header(path)
    try:
        # The library takes no path that is not UTF-8.
        return load(path.read_bytes()) if not_utf8(str(path)) else load_file(path)
    except (SafetensorError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file",
            found=str(error)[:200],
            wanted=FORMATS,
            fix="download it again",
        ) from None


def save_part(path: str, prefix: str, out: str) -> None:
    """Write what is below a prefix in a checkpoint as a .safetensors file of its own, the prefix dropped.

    For a checkpoint that holds several models, or a model among other tensors: the way to say which is meant.
    """
    from safetensors.torch import save_file

    part = prefixes.below(read_checkpoint(Path(path))[0], prefix)
    if not part:
        raise CheckpointError(f"{path} has nothing below {prefix!r}", fix="check the prefix")
    save_file({key: tensor.clone().contiguous() for key, tensor in part.items()}, out)
