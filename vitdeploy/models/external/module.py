"""Modules of others: from a function, a file or an object, with their size and preprocessing."""

import contextlib
import copy
import dataclasses
import difflib
import functools
import hashlib
import importlib
import importlib.metadata
import random
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor, nn

import vitdeploy
from vitdeploy.errors import CheckpointError, UserCodeError
from vitdeploy.graph.io.bound import further_note
from vitdeploy.models.checkpoints import fit, mismatch, read
from vitdeploy.models.external.adapted import IMAGE_SIZE, SEED, adapt, size_of, size_within, with_own_scaling
from vitdeploy.models.external.arguments import example_inputs, passing_notes, require_arguments
from vitdeploy.models.family import LoadedModel
from vitdeploy.models.model_folder.image_processor import timm_preprocess
from vitdeploy.models.source import last_line, where
from vitdeploy.runtime.tasks.detection import PostprocessSpec
from vitdeploy.runtime.values import number_of_classes
from vitdeploy.spec import PreprocessSpec, Task, postprocess_of

# --- A module of the user's own, with what has to be known of it ------------------------------------------------------
# what a function returned, or one that is in memory.


ASSUMED = "the module does not say how images are prepared: mean = std = 0.5 is assumed"


def from_module(
    module: nn.Module,
    *,
    name: str = "",
    preprocess: PreprocessSpec | None = None,
    image_size: tuple[int, int] | None = None,
    task: Task | None = None,
    labels: Sequence[str] = (),
    bind: Sequence[str] = (),
) -> LoadedModel:
    """A copy of a module in memory as the original of a job: on the CPU, float32, in evaluation mode.

    Args:
        name: for people; by default that of its class.
        preprocess: how its images are prepared; by default as `pretrained_cfg` says (timm's modules have it), else
            as its first operators scale pixels, or mean = std = 0.5. Where answers lie in the image, as maps and boxes
            do, by default both sides are resized.
        image_size: (height, width) in pixels; by default the crop of `preprocess`, else what the module says, else 224.
        task: what its outputs are to be taken for; "features" where one output [batch, width] is no logits.
        labels: one name a class, in the order of the outputs.
        bind: "NAME=VALUE" of arguments beside the image, which become constants.

    Raises:
        UserCodeError: no torch.nn.Module, or one that cannot be copied.
        CheckpointError: it does not run on such images, its outputs are of no task or of another one, or preprocessing,
            labels or bound values do not fit it.
        InputError, MissingFileError: a bound value cannot be read.
    """
    require_module(module, f"{name or 'what is given'} is no model")
    name = name or type(module).__name__
    own = copied(module, name)
    original = described(own, name, image_size, preprocess=preprocess, task=task, bind=bind)
    signature = original.signature
    classes = number_of_classes(signature.outputs, signature.postprocess) if signature.task != "features" else None
    if labels and len(labels) != classes:
        raise CheckpointError(
            f"the labels do not fit {name}",
            found=f"{len(labels)} labels",
            expected=f"one per class: {classes}" if classes else "none: it has no classes",
        )
    return dataclasses.replace(original, family="module", labels=tuple(labels))


def copied(module: nn.Module, name: str) -> nn.Module:
    """A copy on the CPU. Raises UserCodeError if copy.deepcopy does not take the module."""
    try:
        return copy.deepcopy(module).cpu()
    except Exception as error:  # tensors that are results of a computation, locks, open files
        raise UserCodeError(
            f"{name} cannot be copied",
            found=f"{type(error).__name__}: {last_line(error)}",
            expected="a module that copy.deepcopy takes: the one that is given stays as it is",
            fix="give one that is built anew, with load_state_dict(module.state_dict())",
        ) from None


def require_module(model: object, refused: str) -> nn.Module:
    """The model itself. Raises UserCodeError, called `refused`, where it is no torch.nn.Module."""
    if isinstance(model, nn.Module):
        return model
    found = f"the class {model.__name__} itself" if isinstance(model, type) else type(model).__name__
    raise UserCodeError(refused, found=found, expected="a torch.nn.Module")


def described(
    model: nn.Module,
    name: str,
    image_size: tuple[int, int] | None,
    *,
    preprocess: PreprocessSpec | None = None,
    task: Task | None = None,
    notes: Sequence[str] = (),
    bind: Sequence[str] = (),
) -> LoadedModel:
    """A user's module with its size, preprocessing and outputs, as far as it declares them; `notes` come first.

    Raises:
        CheckpointError: it does not run on such images, its outputs fit no task, or `preprocess` or a value of `bind`
            does not fit it.
        InputError, MissingFileError: a value of `bind` cannot be read.
    """
    told = list(notes)
    require_arguments(model, bind, name)
    own = getattr(model, "pretrained_cfg", None) or {}
    known = size_of(model, own)
    within = None if known else size_within(model)
    chosen = image_size or (preprocess.crop if preprocess is not None else None)
    size = chosen or known or within or IMAGE_SIZE
    channels = preprocess.channels if preprocess is not None else _channels(model)
    if preprocess is not None and preprocess.crop != size:
        raise CheckpointError(
            f"the preprocessing does not fit {name}",
            found=f"crop {preprocess.crop[0]}x{preprocess.crop[1]}",
            expected=f"crop {size[0]}x{size[1]}, the image size that is asked for",
            fix="change the crop, or leave the image size out",
        )
    if chosen is None and known is None:
        assumption = f"{size[0]}x{size[1]} is {'that of its parts' if within else 'assumed'}"
        told.append(
            f"the module does not say its image size: {assumption} (--image-size; source.image_size in a recipe)"
        )
    adapted, signature = adapt(model, size, channels, name, task=task, bind=bind)
    told += [*passing_notes(adapted.passings, bind), *further_note(signature.inputs)]
    if isinstance(signature.postprocess, PostprocessSpec):
        scores = signature.postprocess.scores
        told.append(f"detections are scored by {scores}, as far as the module tells (postprocess: says otherwise)")
    assumed = None if preprocess is not None or own else ASSUMED
    preprocess = preprocess or _preprocess(own, channels, size, signature.task)
    return with_own_scaling(LoadedModel(name, "function", adapted, signature, preprocess, notes=tuple(told)), assumed)


def _preprocess(pretrained: Mapping[str, Any], channels: int, size: tuple[int, int], task: Task) -> PreprocessSpec:
    """Of timm's config, or one that is assumed. Where answers are about an image as such, its short side is resized and
    the middle cut out; where they lie in the image the model sees all of it."""
    if pretrained:
        spec = timm_preprocess(pretrained, channels, size)
    else:
        plain = size[0] if size[0] == size[1] else size
        spec = PreprocessSpec(plain, size, mean=(0.5,) * channels, std=(0.5,) * channels)
    kind = postprocess_of(task)
    about_images = kind is None or kind.about_images
    return spec if about_images else dataclasses.replace(spec, resize=size, fit="stretch")


def _channels(model: nn.Module) -> int:
    """Input channels of the first convolution; 3 where there is none."""
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    return first.in_channels if first is not None else 3


# --- The working folder as a place for the modules of a user's own model, and for nobody else's imports ---------------
# Python looks for every import in the folder that a program was started in. There a folder called `triton` is then
# taken for the package of that name, by PyTorch too, which asks for it while it exports. So that folder is on no path
# of ours (`runtime.interpreter`), and this finder shows it to the code that lies in it alone.


# Frames between an import and who asks for it.
MACHINERY = ("<frozen importlib", str(Path(importlib.__file__).parent))
PROBES = ("<frozen importlib.util>", str(Path(importlib.__file__).parent / "util.py"))
INSTALLED = {"site-packages", "dist-packages"}
STANDARD = Path(sysconfig.get_path("stdlib"))


class WorkingFolder(MetaPathFinder):
    """Finds the modules of one folder.

    For code of this folder they come first, as for a script that is started there; folders without `__init__.py` come
    last. Libraries that this code calls find its modules by name while the model is built (a pickle, a registry).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.named = ""
        self.building = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is not None:  # of a package, which has a path of its own
            return None
        spec = PathFinder.find_spec(fullname, [str(self.folder)])
        if spec is None:
            return None
        asked_by_own = fullname == self.named or is_own(_asking(), self.folder)
        if spec.origin is None:  # a folder without __init__.py: whatever else has the name is meant
            return spec if asked_by_own and not self._elsewhere(fullname) else None
        if asked_by_own:
            return spec
        return spec if self.building and not _probed() and not self._elsewhere(fullname) else None

    def _elsewhere(self, name: str) -> bool:
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        return any(finder.find_spec(name, None) is not None for finder in others)

    @contextlib.contextmanager
    def build(self) -> Iterator[None]:
        """While the user's own code makes a model."""
        self.building = True
        try:
            yield
        finally:
            self.building = False

    def import_module(self, name: str) -> ModuleType:
        """Import the module that the user named; its errors propagate."""
        importlib.invalidate_caches()
        self.named = name.partition(".")[0]
        try:
            return importlib.import_module(name)
        finally:
            self.named = ""

    def hidden(self, name: str) -> str | None:
        """The file of a module that is loaded already, where it hides one of this folder; None otherwise."""
        top = name.partition(".")[0]
        loaded = sys.modules.get(top)
        spec = PathFinder.find_spec(top, [str(self.folder)]) if loaded is not None else None
        if spec is None or spec.origin is None:
            return None
        file = getattr(loaded, "__file__", None)
        same = file is not None and Path(file).resolve() == Path(spec.origin).resolve()
        return None if same else file or "Python itself"


def shown_folder() -> WorkingFolder:
    """The finder of the working folder, which stays: a model may import when it first runs."""
    folder = Path.cwd()
    for finder in sys.meta_path:
        if isinstance(finder, WorkingFolder) and finder.folder == folder:
            return finder
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, WorkingFolder)]
    added = WorkingFolder(folder)
    sys.meta_path.insert(sys.meta_path.index(PathFinder), added)
    return added


def is_own(file: str | None, folder: Path) -> bool:
    """Whether a code file in this folder is the user's own, not part of an environment in the folder."""
    if not file or file.startswith("<"):
        return False
    path = Path(file)
    return path.is_relative_to(folder) and not INSTALLED & set(path.parts) and not path.is_relative_to(STANDARD)


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename != __file__:
            yield frame
        frame = frame.f_back


def _asking() -> str | None:
    """The file of the code that asks for an import."""
    files = (frame.f_code.co_filename for frame in _frames())
    return next((file for file in files if not file.startswith(MACHINERY)), None)


def _probed() -> bool:
    """Whether the caller only checks that such a module exists, as libraries do for optional ones."""
    for frame in _frames():
        if not frame.f_code.co_filename.startswith(MACHINERY):
            return False
        if frame.f_code.co_filename in PROBES:
            return True
    return False


# --- Load the module, with its weights, that a user's own function returns; the working folder is searched too --------


EXPECTED = "a function that takes nothing and returns a torch.nn.Module"


def from_function(
    reference: str,
    image_size: tuple[int, int] | None,
    checkpoint: Path | None = None,
    task: Task | None = None,
    preprocess: PreprocessSpec | None = None,
    bind: Sequence[str] = (),
) -> LoadedModel:
    """Call `package.module:function` without arguments; the result gets the weights of `checkpoint` if given.

    `preprocess` None: as the module's `pretrained_cfg` says (timm's modules have it), else as `described` assumes.
    `bind`: "NAME=VALUE" of arguments of its forward beside the image.

    Raises:
        UserCodeError: no such module or function, it fails, or it returns something other than a torch.nn.Module.
        CheckpointError, MissingFileError, PickleError, NonFiniteWeightsError: the checkpoint does not fit the module.
    """
    model = _call(_function(reference), reference)
    notes = [f"{reference} returned a {type(model).__name__}"]
    if checkpoint is not None:
        state, remarks = read.read_tensors(checkpoint)
        try:
            told = fit.load_state(model, state, str(checkpoint))
        except CheckpointError:
            mismatch.refuse_state(str(checkpoint), state)  # which says what it is, where that is known
            raise
        notes += [*remarks, *told, f"its weights are those of {checkpoint.name}"]
    return described(model, reference, image_size, preprocess=preprocess, task=task, notes=notes, bind=bind)


def _function(reference: str) -> Callable[[], Any]:
    module_name, _, function_name = reference.partition(":")
    if not module_name or not function_name:
        raise UserCodeError(
            f"{reference!r} names no function",
            expected="package.module:function",
            fix="for build() in my_model.py: --model my_model:build",
        )
    folder = shown_folder()
    if (file := folder.hidden(module_name)) is not None:
        raise UserCodeError(
            f"{module_name} in the working folder has the name of another module, which is loaded already",
            found=file,
            expected="a name of its own",
            fix="rename the file",
        )
    try:
        with folder.build():
            module = folder.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise UserCodeError(
            f"{module_name} cannot be imported",
            found=where(error),
            expected="a module on the Python path, or in the working folder",
            fix=f"name it without .py: {module_name[:-3]}:{function_name}" if module_name.endswith(".py") else "",
        ) from None
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [name for name in vars(module) if callable(getattr(module, name)) and not name.startswith("_")]
        near = difflib.get_close_matches(function_name, names, n=1)
        raise UserCodeError(
            f"{module_name} has no function {function_name!r}",
            found=", ".join(names)[:200] or "no function",
            expected=EXPECTED,
            fix=f"did you mean {module_name}:{near[0]}?" if near else "",
        )
    return function


def _call(function: Callable[[], Any], reference: str) -> nn.Module:
    try:
        # The model is built again in other processes; weights that it draws must be the same there.
        with _seeded(), shown_folder().build():
            model = function()
    except (Exception, SystemExit) as error:
        raise UserCodeError(f"{reference} failed", found=where(error), expected=EXPECTED) from None
    return require_module(model, f"{reference} returned no model").float().eval()


@contextlib.contextmanager
def _seeded() -> Iterator[None]:
    """The generators of PyTorch, numpy and Python, seeded, and afterwards as they were before."""
    before = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(SEED)
            np.random.seed(SEED)
            random.seed(SEED)
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


# --- The identity of an external module -------------------------------------------------------------------------------
# as digests of all that its answers depend on; equal identities share artifacts.
#
# No checkpoint file stands for such a module. Its code may change with the same weights, and its weights with the same
# code; and neither shows what a function reads, draws at random or downloads.


IDENTITY_SEED = 0
OURS = Path(vitdeploy.__file__).parent


def weights_digest(module: nn.Module) -> str:
    """SHA-256 of all parameters and buffers, those too that no checkpoint holds: names, types, shapes and numbers."""
    total = hashlib.sha256()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        total.update(_bytes(tensor))
    return total.hexdigest()


def identity(original: LoadedModel) -> str:
    """SHA-256 of the weights, the structure as the module prints it, the user's code that is loaded, the versions of
    the packages that its layers are of, and the answers to two seeded images where it takes images."""
    module = original.module
    total = hashlib.sha256(f"{weights_digest(module)}\n{module}\n".encode())
    for line in (*_packages(module), *_code()):
        total.update(f"{line}\n".encode())
    signature = original.signature
    if not signature.channels:
        return total.hexdigest()
    generator = torch.Generator().manual_seed(IDENTITY_SEED)
    images = torch.randn(2, signature.channels, *signature.image_size, generator=generator)
    with torch.no_grad():
        answers = module(images, *example_inputs(signature.inputs, len(images)))
    for answer in answers if isinstance(answers, tuple) else (answers,):
        total.update(_bytes(answer))
    return total.hexdigest()


def identity_in_memory(original: LoadedModel) -> str:
    """`identity` of a module whose code may lie in no file, as a notebook's: SHA-256 of the weights and of the program
    that PyTorch traces of its code. Where it cannot be traced: `identity`."""
    signature = original.signature
    images = torch.zeros(2, signature.channels, *signature.image_size)
    further, opened = example_inputs(signature.inputs, len(images)), {0: torch.export.Dim.DYNAMIC}
    batch = (opened, *([(opened,) * len(further)] if further else []))
    try:
        with torch.no_grad():
            program = torch.export.export(original.module, (images, *further), dynamic_shapes=batch, strict=False)
    except Exception:  # the export says what is wrong with it
        return identity(original)
    total = hashlib.sha256(weights_digest(original.module).encode())
    for name, part in program.graph_module.named_modules():
        if isinstance(part, torch.fx.GraphModule):
            total.update(f"{name}\n{part.graph}\n".encode())
    for name, constant in sorted(program.constants.items()):
        total.update(name.encode())
        if isinstance(constant, Tensor):
            total.update(_bytes(constant))
    return total.hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _packages(module: nn.Module) -> list[str]:
    """The installed packages that the layers' classes are of, with the versions of their distributions."""
    names = {type(layer).__module__.partition(".")[0] for layer in module.modules()} - {"torch", "vitdeploy"}
    files = {name: getattr(sys.modules.get(name), "__file__", None) or "" for name in names}
    installed = [name for name, file in files.items() if INSTALLED & set(Path(file).parts)]
    known = importlib.metadata.packages_distributions() if installed else {}
    return sorted(
        {f"{name} {each} {importlib.metadata.version(each)}" for name in installed for each in known.get(name, ())}
    )


def _code() -> list[str]:
    """The files of all loaded modules that are neither Python's, nor installed, nor ours, with their digests."""
    loaded = {file for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))}
    files = {Path(file) for file in loaded if file.endswith(".py") and not _known(file)}
    return sorted(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in files if file.is_file())


@functools.cache  # of some 4,000 files that are loaded with PyTorch, at every look at a module
def _known(file: str) -> bool:
    path = Path(file)
    return bool(INSTALLED & set(path.parts)) or path.is_relative_to(OURS) or path.is_relative_to(STANDARD)


# --- A module in memory for other processes of the same run: with its code, which may be a notebook's -----------------
# cloudpickle writes classes of a notebook or of the user's own files by value, so that a measuring process needs none
# of these. The file lies in a folder that only this user can read, is named by no recipe and no bundle, and is read by
# processes of the run that wrote it.


def save_module(
    module: object,
    folder: Path,
    *,
    preprocess: PreprocessSpec | None = None,
    image_size: tuple[int, int] | None = None,
    task: Task | None = None,
) -> Path:
    """Save a copy of a module, and its description, to a file in `folder`; `open_module` reads it.

    Raises:
        UserCodeError: not a torch.nn.Module, or one that cannot be copied or written.
    """
    model = require_module(module, "what is given is no model")
    name = type(model).__name__
    options = {"preprocess": preprocess, "image_size": image_size, "task": task}
    file = folder / f"{name}.pickle"
    try:
        with _by_value(model):
            file.write_bytes(cloudpickle.dumps((copied(model, name), options)))
    except UserCodeError:
        raise
    except Exception as error:  # open files, locks, generators in attributes
        raise UserCodeError(
            f"{name} cannot be given to other processes, which measure it",
            found=f"{type(error).__name__}: {last_line(error)}",
            expected="a module whose attributes can be pickled",
            fix="take the attribute away, or give a function that builds it: model(function='package.module:function')",
        ) from None
    return file


def open_module(
    file: Path,
    image_size: tuple[int, int] | None = None,
    preprocess: PreprocessSpec | None = None,
    bind: Sequence[str] = (),
) -> LoadedModel:
    """Read what `save_module` wrote, as the original of a job; a size and preprocessing that are given count. Errors as
    in `from_module`."""
    module, options = cloudpickle.loads(file.read_bytes())  # written by this run, in a folder of this user's alone
    options["image_size"] = image_size or options["image_size"]
    options["preprocess"] = preprocess or options["preprocess"]
    return from_module(module, name=file.stem, bind=bind, **options)


@contextlib.contextmanager
def _by_value(model: nn.Module) -> Iterator[None]:
    """Classes of the user's own files are written whole: another process may not find these."""
    names = {type(layer).__module__ for layer in model.modules()}
    own = [module for name in sorted(names) if (module := sys.modules.get(name)) is not None and _is_users(module)]
    for module in own:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in own:
            cloudpickle.unregister_pickle_by_value(module)


def _is_users(module: ModuleType) -> bool:
    file: Any = getattr(module, "__file__", None)
    return module.__name__ != "__main__" and file is not None and not _known(file)
