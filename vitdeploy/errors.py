"""Every error that vitdeploy raises on purpose, with its stable code and the exit status it turns into.

VitdeployError                     exit 1   a bug of ours when raised as such
├── InputError                     exit 2   the input is wrong
│   ├── RecipeError                VD2001   unknown, missing or ill-typed recipe fields, all at once
│   ├── MissingFileError           VD2002   a file or folder is missing
│   ├── OutputError                VD2003   the output path holds something that vitdeploy did not make
│   ├── UnknownModelError          VD2101   unknown built-in architecture
│   ├── CheckpointError            VD2102   keys, shapes or class count do not fit the architecture
│   ├── NonFiniteWeightsError      VD2103   NaN or infinity in the weights
│   ├── UserCodeError              VD2104   a user function that returns no model
│   ├── ExportError                VD2201   the exported graph is not the same function as the model
│   ├── GraphError                 VD2202   not an ONNX file, or one that this step cannot process
│   ├── DataError                  VD2301   unusable images, annotations or class names
│   ├── ImageError                 VD2302   an image that cannot be decoded, or is too large
│   ├── TensorError                VD2401   an array whose name, dtype or shape the engine does not take
│   ├── TargetError                VD2402   an unknown target, or one that the artifact was not made for
│   ├── UnknownDeviceError         VD2403   a device that is not registered, or wrongly registered
│   └── ClosedError                VD2404   a predictor or runner that is closed, or not loaded yet
├── UnsafeError                    exit 3   refused as unsafe
│   ├── PickleError                VD3001   a pickle that holds more than plain weights
│   ├── DigestError                VD3101   bytes differ from the digest recorded for them
│   ├── ManifestError              VD3102   a manifest that breaks a rule of the format
│   ├── UnsafeGraphError           VD3103   an ONNX file that reaches outside its folder, or of absurd sizes
│   ├── UntrustedEngineError       VD3104   a native engine that neither this user built nor a named identity signed
│   ├── SignatureError             VD3105   not signed, signed by another identity, or changed since
│   ├── DeviceResultError          VD3106   a device's result that is not what it claims to be
│   ├── ArchiveError               VD3107   a packed bundle that `bundle pack` would not write
│   └── LimitError                 VD3108   a file that exceeds its time or memory limit, or crashes the process
├── HostError                      exit 4   this machine lacks something
│   ├── MissingPackageError        VD4001   a package is not installed; names the extra that installs it
│   ├── CapabilityError            VD4002   the runtime or CPU lacks a feature
│   │   └── KnownBadError          VD4003   this runtime release is known to compute such a graph wrongly
│   ├── KnownBadTableError         VD4004   the table of such releases cannot be read
│   ├── StorageError               VD4101   the disk is full, read-only or not writable
│   ├── HubError                   VD4102   a model hub that cannot be reached, or does not have it
│   ├── EngineError                VD4201   a runtime refused or failed on a graph
│   ├── WorkerError                VD4202   a worker process, or the command itself, died
│   ├── DeviceMemoryError          VD4203   too little memory on the GPU
│   ├── AnswersError               VD4204   an engine does not reproduce its golden answers on this machine
│   └── DeviceError                VD4301   a device that cannot be reached, or whose job was lost
└── GateError                      exit 5, VD5001   a budget is not met, or not provably met
"""

import re
import shlex
from collections.abc import Iterator

# Characters that control a terminal or that it cannot print: control characters except tabs and newlines, bidirectional
# controls (Unicode Standard Annex 9, section 2), and lone surrogates.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
# Characters that a shell interprets inside double quotes.
_EXPANDED = set('"$`!\\\n')


def visible(text: str) -> str:
    """Return text that is safe to print whatever its source: terminal control characters are escaped."""
    return _OBEYED.sub(lambda found: ascii(found[0])[1:-1], text)


def quoted(word: object) -> str:
    """Return a path or name quoted for a shell, for use in printed commands: a hostile name cannot change what a pasted
    command runs."""
    return shlex.quote(str(word))


def python_command(code: str) -> str:
    """Return a shell command that runs Python code, with quoting that is safe for any path or name in it."""
    return "python -c " + (quoted(code) if set(code) & _EXPANDED else '"' + code + '"')


class VitdeployError(Exception):
    """Base of all errors raised on purpose.

    `message` says what is wrong; `found`, `expected` and `fix` are printed on their own lines when given.
    """

    code = "VD1000"
    exit_code = 1

    # The fix shown for errors of a class that set none.
    default_fix = ""
    # Whether the command has already printed its result when this error is raised.
    after_document = False

    def __init__(self, message: str, *, found: str = "", expected: str = "", fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.found = found
        self.expected = expected
        self.fix = fix or self.default_fix

    def __str__(self) -> str:
        lines = [f"{self.code}  {self.message}"]
        for name in ("found", "expected", "fix"):
            value = getattr(self, name)
            if value:
                lines.append(f"        {name + ':':<10}{value}")
        return visible("\n".join(lines))

    def to_dict(self) -> dict[str, object]:
        fields = {"code": self.code, "message": self.message, "exit_code": self.exit_code}
        return {**fields, "found": self.found, "expected": self.expected, "fix": self.fix}


class InputError(VitdeployError):
    code = "VD2000"
    exit_code = 2


class RecipeError(InputError):
    """All problems of a recipe, one line each with its `$.path`; `more` counts those not listed."""

    code = "VD2001"
    default_fix = "correct these fields; `vitdeploy run --help` shows a complete recipe"

    def __init__(self, source: str, problems: list[str], more: int = 0, *, fix: str = "") -> None:
        total = len(problems) + more
        count = f"{total:,} problem" + ("s" if total != 1 else "")
        lines = [*problems, f"and {more:,} more"] if more else problems
        super().__init__(
            "\n".join([f"{source}: {count}", *(f"        {problem}" for problem in lines)]),
            fix=fix,
        )
        self.problems = problems


class MissingFileError(InputError):
    code = "VD2002"


class OutputError(InputError):
    code = "VD2003"


class UnknownModelError(InputError):
    code = "VD2101"


class CheckpointError(InputError):
    code = "VD2102"


class NonFiniteWeightsError(InputError):
    code = "VD2103"


class UserCodeError(InputError):
    code = "VD2104"


class ExportError(InputError):
    code = "VD2201"


class GraphError(InputError):
    code = "VD2202"


class DataError(InputError):
    code = "VD2301"


class ImageError(InputError):
    code = "VD2302"


class TensorError(InputError):
    code = "VD2401"


class TargetError(InputError):
    code = "VD2402"


class UnknownDeviceError(InputError):
    code = "VD2403"


class ClosedError(InputError, RuntimeError):
    code = "VD2404"


class UnsafeError(VitdeployError):
    code = "VD3000"
    exit_code = 3


class PickleError(UnsafeError):
    code = "VD3001"


class DigestError(UnsafeError):
    code = "VD3101"


class ManifestError(UnsafeError):
    code = "VD3102"
    default_fix = "get the bundle again from its source: vitdeploy does not write such a manifest"


class UnsafeGraphError(UnsafeError):
    code = "VD3103"


class UntrustedEngineError(UnsafeError):
    code = "VD3104"


class SignatureError(UnsafeError):
    code = "VD3105"


class DeviceResultError(UnsafeError):
    code = "VD3106"


class ArchiveError(UnsafeError):
    code = "VD3107"


class LimitError(UnsafeError):
    code = "VD3108"


class HostError(VitdeployError):
    code = "VD4000"
    exit_code = 4


class MissingPackageError(HostError):
    """`extra` is vitdeploy's extra that installs the package, "" for none. `target` names a target that needs more than
    a package; the fix then points to `vitdeploy doctor`. `error` names the missing module, which may be a dependency of
    the package."""

    code = "VD4001"

    def __init__(
        self, package: str, extra: str, why: str, target: str = "", error: ModuleNotFoundError | None = None
    ) -> None:
        missing = ((error and error.name) or "").partition(".")[0]
        if missing and re.sub("[-_]", "", missing) not in re.sub("[-_]", "", package):  # a dependency of the package
            why, package = f"{why} by {package}", missing
        further = f"; `vitdeploy doctor --target {target}` lists what else is missing" if target else ""
        super().__init__(
            f"{why} needs the package {package}, which is not installed",
            fix=(f"pip install 'vitdeploy[{extra}]'" if extra else f"pip install {package}") + further,
        )
        self.package = package
        self.extra = extra


class CapabilityError(HostError):
    code = "VD4002"


class KnownBadError(CapabilityError):
    """`entries` are the ids in the table of known-bad runtime releases."""

    code = "VD4003"
    entries: tuple[str, ...] = ()


class KnownBadTableError(HostError):
    code = "VD4004"


class StorageError(HostError):
    code = "VD4101"


class HubError(HostError):
    code = "VD4102"


class EngineError(HostError):
    code = "VD4201"


class WorkerError(HostError):
    code = "VD4202"


class DeviceMemoryError(HostError):
    code = "VD4203"


class AnswersError(HostError):
    """`bundle` is the bundle's folder and `engine` the engine's name; "" if unknown."""

    code = "VD4204"
    bundle: str = ""
    engine: str = ""


class DeviceError(HostError):
    code = "VD4301"


class GateError(VitdeployError):
    code = "VD5001"
    exit_code = 5
    after_document = True


def error_with_code(code: str, message: str, **fields: str) -> VitdeployError:
    """Return an error of the class with this `code`, as reported by another process. `message` is used as it is, also
    for classes that compose their own."""
    kind = next((kind for kind in _subclasses(VitdeployError) if kind.code == code), VitdeployError)
    error = kind.__new__(kind)
    VitdeployError.__init__(error, message, **fields)
    return error


def _subclasses(kind: type[VitdeployError]) -> Iterator[type[VitdeployError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _subclasses(child)


__all__ = [kind.__name__ for kind in _subclasses(VitdeployError)]
