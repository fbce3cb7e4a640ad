"""User modules from a function, a file or an object, with their image size and preprocessing."""

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

# --- A user's module with its signature and preprocessing -------------------------------------------------------------
# The module was returned by a function, or is in memory.


ASSUMED = "the module does not declare its preprocessing: assuming mean = std = 0.5"


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
    """Return a copy of a module in memory as the original of a job: on the CPU, float32, in evaluation mode.

    Args:
        name: the displayed name; by default that of its class.
        preprocess: how its images are prepared; by default from its `pretrained_cfg` (timm's modules have it), else
            from the pixel scaling of its first operators, else mean = std = 0.5. For outputs with positions in the
            image, such as maps and boxes, both sides are resized by default.
        image_size: (height, width) in pixels; by default the crop of `preprocess`, else the module's own, else 224.
        task: the task to interpret its outputs as; "features" for a single output [batch, width] that is not logits.
        labels: one name per class, in the order of the outputs.
        bind: "NAME=VALUE" for arguments besides the image, which become constants.

    Raises:
        UserCodeError: not a torch.nn.Module, or one that cannot be copied.
        CheckpointError: it does not run on such images, its outputs match no task or not `task`, or preprocessing,
            labels or bound values do not fit it.
        InputError, MissingFileError: a bound value cannot be read.
    """
    require_module(module, f"{name or 'the object'} is not a model")
    name = name or type(module).__name__
    own = copied(module, name)
    original = described(own, name, image_size, preprocess=preprocess, task=task, bind=bind)
    signature = original.signature
    classes = number_of_classes(signature.outputs, signature.postprocess) if signature.task != "features" else None
    if labels and len(labels) != classes:
        raise CheckpointError(
            f"the labels do not fit {name}",
            found=f"{len(labels)} labels",
            expected=f"one per class: {classes}" if classes else "no labels: the model has no classes",
        )
    return dataclasses.replace(original, family="module", labels=tuple(labels))


def copied(module: nn.Module, name: str) -> nn.Module:
    """Return a copy on the CPU. Raises UserCodeError if copy.deepcopy fails."""
    try:
        return copy.deepcopy(module).cpu()
    except Exception as error:  # non-leaf tensors, locks, open files
        raise UserCodeError(
            f"{name} cannot be copied",
            found=f"{type(error).__name__}: {last_line(error)}",
            expected="a module that copy.deepcopy accepts (vitdeploy does not modify the original)",
            fix="pass a newly built module with load_state_dict(module.state_dict())",
        ) from None


def require_module(model: object, refused: str) -> nn.Module:
    """Return the model itself. Raises UserCodeError with the message `refused` if it is not a torch.nn.Module."""
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
    """Return a user's module with its size, preprocessing and outputs, declared or assumed; `notes` come first.

    Raises:
        CheckpointError: it does not run on such images, its outputs match no task, or `preprocess` or a value of `bind`
            does not fit it.
        InputError, MissingFileError: a value of `bind` cannot be read.
    """
    remarks = list(notes)
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
            expected=f"crop {size[0]}x{size[1]}, the requested image size",
            fix="change the crop, or omit the image size",
        )
    if chosen is None and known is None:
        assumption = f"{'using that of its parts' if within else 'assuming'} {size[0]}x{size[1]}"
        remarks.append(
            f"the module does not declare its image size: {assumption} (--image-size; source.image_size in a recipe)"
        )
    adapted, signature = adapt(model, size, channels, name, task=task, bind=bind)
    remarks += [*passing_notes(adapted.passings, bind), *further_note(signature.inputs)]
    if isinstance(signature.postprocess, PostprocessSpec):
        scores = signature.postprocess.scores
        remarks.append(f"detections are scored by {scores}, inferred from the module (override with postprocess:)")
    assumed = None if preprocess is not None or own else ASSUMED
    preprocess = preprocess or _preprocess(own, channels, size, signature.task)
    return with_own_scaling(
        LoadedModel(name, "function", adapted, signature, preprocess, notes=tuple(remarks)), assumed
    )


def _preprocess(pretrained: Mapping[str, Any], channels: int, size: tuple[int, int], task: Task) -> PreprocessSpec:
    """Return timm's preprocessing, or an assumed one. If outputs describe an image as a whole, its short side is
    resized and the centre cropped; if they have positions in the image, the model gets all of it."""
    if pretrained:
        spec = timm_preprocess(pretrained, channels, size)
    else:
        plain = size[0] if size[0] == size[1] else size
        spec = PreprocessSpec(plain, size, mean=(0.5,) * channels, std=(0.5,) * channels)
    kind = postprocess_of(task)
    about_images = kind is None or kind.about_images
    return spec if about_images else dataclasses.replace(spec, resize=size, fit="stretch")


def _channels(model: nn.Module) -> int:
    """Return the input channels of the first convolution; 3 without a convolution."""
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    return first.in_channels if first is not None else 3


# --- Imports from the working folder, for the user's own model code only ----------------------------------------------
# Python searches the folder that a program was started in for every import. A folder called `triton` in it would shadow
# the package of that name, which PyTorch imports during export. So that folder is not on our path
# (`runtime.interpreter`), and this finder exposes it only to the code inside it.


# Frames between an import and the importing code.
MACHINERY = ("<frozen importlib", str(Path(importlib.__file__).parent))
PROBES = ("<frozen importlib.util>", str(Path(importlib.__file__).parent / "util.py"))
INSTALLED = {"site-packages", "dist-packages"}
STANDARD = Path(sysconfig.get_path("stdlib"))


class WorkingFolder(MetaPathFinder):
    """Finds the modules of one folder.

    For code in this folder they take precedence, as for a script started there; folders without `__init__.py` come
    last. Libraries called by this code find its modules by name while the model is built (a pickle, a registry).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.named = ""
        self.building = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is not None:  # within a package, which has its own path
            return None
        spec = PathFinder.find_spec(fullname, [str(self.folder)])
        if spec is None:
            return None
        asked_by_own = fullname == self.named or is_own(_asking(), self.folder)
        if spec.origin is None:  # a folder without __init__.py: any other module of that name takes precedence
            return spec if asked_by_own and not self._elsewhere(fullname) else None
        if asked_by_own:
            return spec
        return spec if self.building and not _probed() and not self._elsewhere(fullname) else None

    def _elsewhere(self, name: str) -> bool:
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        return any(finder.find_spec(name, None) is not None for finder in others)

    @contextlib.contextmanager
    def build(self) -> Iterator[None]:
        """Context in which the user's code builds a model."""
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
        """Return the file of a loaded module that hides one of this folder, else None."""
        top = name.partition(".")[0]
        loaded = sys.modules.get(top)
        spec = PathFinder.find_spec(top, [str(self.folder)]) if loaded is not None else None
        if spec is None or spec.origin is None:
            return None
        file = getattr(loaded, "__file__", None)
        same = file is not None and Path(file).resolve() == Path(spec.origin).resolve()
        return None if same else file or "Python itself"


def shown_folder() -> WorkingFolder:
    """Return the finder of the working folder; it stays installed, as a model may import when it first runs."""
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
    """Return the file of the importing code."""
    files = (frame.f_code.co_filename for frame in _frames())
    return next((file for file in files if not file.startswith(MACHINERY)), None)


def _probed() -> bool:
    """Whether the caller only checks that a module exists, as libraries do for optional ones."""
    for frame in _frames():
        if not frame.f_code.co_filename.startswith(MACHINERY):
            return False
        if frame.f_code.co_filename in PROBES:
            return True
    return False


# --- Load the module that a user's function returns; the working folder is searched too -------------------------------


EXPECTED = "a function without arguments that returns a torch.nn.Module"


def from_function(
    reference: str,
    image_size: tuple[int, int] | None,
    checkpoint: Path | None = None,
    task: Task | None = None,
    preprocess: PreprocessSpec | None = None,
    bind: Sequence[str] = (),
) -> LoadedModel:
    """Call `package.module:function` without arguments; the result gets the weights of `checkpoint` if given.

    `preprocess` None: from the module's `pretrained_cfg` (timm's modules have it), else as assumed by `described`.
    `bind`: "NAME=VALUE" for arguments of its forward besides the image.

    Raises:
        UserCodeError: no such module or function, it fails, or it returns something other than a torch.nn.Module.
        CheckpointError, MissingFileError, PickleError, NonFiniteWeightsError: the checkpoint does not fit the module.
    """
    model = _call(_function(reference), reference)
    notes = [f"{reference} returned a {type(model).__name__}"]
    if checkpoint is not None:
        state, remarks = read.read_tensors(checkpoint)
        try:
            differences = fit.load_state(model, state, str(checkpoint))
        except CheckpointError:
            mismatch.refuse_state(str(checkpoint), state)  # it names the kind of file, if known
            raise
        notes += [*remarks, *differences, f"weights from {checkpoint.name}"]
    return described(model, reference, image_size, preprocess=preprocess, task=task, notes=notes, bind=bind)


def _function(reference: str) -> Callable[[], Any]:
    module_name, _, function_name = reference.partition(":")
    if not module_name or not function_name:
        raise UserCodeError(
            f"{reference!r} does not name a function",
            expected="package.module:function",
            fix="for build() in my_model.py: --model my_model:build",
        )
    folder = shown_folder()
    if (file := folder.hidden(module_name)) is not None:
        raise UserCodeError(
            f"{module_name} in the working folder has the name of another, already loaded module",
            found=file,
            expected="a unique name",
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
        # Other processes build the model again; its random weights must be the same there.
        with _seeded(), shown_folder().build():
            model = function()
    except (Exception, SystemExit) as error:
        raise UserCodeError(f"{reference} failed", found=where(error), expected=EXPECTED) from None
    return require_module(model, f"{reference} did not return a model").float().eval()


@contextlib.contextmanager
def _seeded() -> Iterator[None]:
    """Context in which the generators of PyTorch, numpy and Python are seeded; it restores their state."""
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
# A digest of everything that its outputs depend on; equal identities share artifacts.
#
# Such a module has no checkpoint file. Its code may change with the same weights, and its weights with the same code;
# and neither shows what a function reads, draws at random or downloads.


IDENTITY_SEED = 0
OURS = Path(vitdeploy.__file__).parent


def weights_digest(module: nn.Module) -> str:
    """Return the SHA-256 of all parameters and buffers, non-persistent ones too: names, types, shapes and values."""
    total = hashlib.sha256()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        total.update(_bytes(tensor))
    return total.hexdigest()


def identity(original: LoadedModel) -> str:
    """Return the SHA-256 of the weights, the module's printed structure, the loaded user code, the versions of the
    packages of its layers, and the outputs for two seeded images if it takes images."""
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
    """`identity` of a module whose code may not be in a file, such as a notebook's: the SHA-256 of the weights and of
    the program that PyTorch traces. If it cannot be traced: `identity`."""
    signature = original.signature
    images = torch.zeros(2, signature.channels, *signature.image_size)
    further, opened = example_inputs(signature.inputs, len(images)), {0: torch.export.Dim.DYNAMIC}
    batch = (opened, *([(opened,) * len(further)] if further else []))
    try:
        with torch.no_grad():
            program = torch.export.export(original.module, (images, *further), dynamic_shapes=batch, strict=False)
    except Exception:  # the export reports the error
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
    """Return the installed packages of the layers' classes, with the versions of their distributions."""
    names = {type(layer).__module__.partition(".")[0] for layer in module.modules()} - {"torch", "vitdeploy"}
    files = {name: getattr(sys.modules.get(name), "__file__", None) or "" for name in names}
    installed = [name for name, file in files.items() if INSTALLED & set(Path(file).parts)]
    known = importlib.metadata.packages_distributions() if installed else {}
    return sorted(
        {f"{name} {each} {importlib.metadata.version(each)}" for name in installed for each in known.get(name, ())}
    )


def _code() -> list[str]:
    """Return the files and digests of all loaded modules that are neither Python's, nor installed, nor ours."""
    loaded = {file for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))}
    files = {Path(file) for file in loaded if file.endswith(".py") and not _known(file)}
    return sorted(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in files if file.is_file())


@functools.cache  # PyTorch loads some 4,000 files, which every identity checks
def _known(file: str) -> bool:
    path = Path(file)
    return bool(INSTALLED & set(path.parts)) or path.is_relative_to(OURS) or path.is_relative_to(STANDARD)


# --- Pass a module in memory, with its code, to other processes of the same run ---------------------------------------
# cloudpickle writes classes from a notebook or the user's own files by value, so that a measuring process does not need
# them. The file is in a folder that only this user can read, is not named in any recipe or bundle, and is read only by
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
    model = require_module(module, "the object is not a model")
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
            f"{name} cannot be passed to the measuring processes",
            found=f"{type(error).__name__}: {last_line(error)}",
            expected="a module whose attributes can be pickled",
            fix="remove the attribute, or pass a function that builds it: model(function='package.module:function')",
        ) from None
    return file


def open_module(
    file: Path,
    image_size: tuple[int, int] | None = None,
    preprocess: PreprocessSpec | None = None,
    bind: Sequence[str] = (),
) -> LoadedModel:
    """Read a file of `save_module` as the original of a job; a size and preprocessing passed here take precedence.
    Errors as in `from_module`."""
    module, options = cloudpickle.loads(file.read_bytes())  # written by this run, in a folder private to this user
    options["image_size"] = image_size or options["image_size"]
    options["preprocess"] = preprocess or options["preprocess"]
    return from_module(module, name=file.stem, bind=bind, **options)


@contextlib.contextmanager
def _by_value(model: nn.Module) -> Iterator[None]:
    """Context in which classes from the user's own files are pickled by value: another process may not find them."""
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
