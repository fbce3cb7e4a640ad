"""Tables of the costs of products, so that a build needs no timing and makes the same choices on a busy machine.

A table belongs to a runtime and a class of CPUs. For each form of a layer it has a few numbers, fitted to times of
single layers (`measure_costs`). They predict ratios of times of whole models, which is all that a choice needs. The
package ships tables; `vitdeploy doctor --measure` creates the table of this CPU, for this user.
"""

import functools
import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import onnx_ir as ir
from scipy.optimize import nnls

from vitdeploy.backends import TARGETS
from vitdeploy.benchmark import run, summary
from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.compilation.backend import COMPILE
from vitdeploy.errors import CapabilityError, InputError
from vitdeploy.extensions import installed_version
from vitdeploy.graph.analysis import work
from vitdeploy.graph.analysis.rows import find_linears
from vitdeploy.graph.io.files import save_graph
from vitdeploy.progress import Progress, silent
from vitdeploy.quantization.placement import DYNAMIC, QUANTIZE, HigherForm, LayerPrecision, place
from vitdeploy.runtime.host import VNNI, describe_host
from vitdeploy.runtime.trust import user_cache, write_atomic
from vitdeploy.search import frame
from vitdeploy.search.layers import BOUNDS, Shape, layer_graph, shapes_of
from vitdeploy.spec import DecodeError, FloatRest, Precision, decode, encode

# --- The table and its predictions ------------------------------------------------------------------------------------


# The forms of a layer: plain INT8, and higher precision, with float operators in fp32 or in bf16.
Form = Literal["int8", "dynamic", "float", "dynamic bf16", "float bf16"]
# The rows that kernels process at once: OpenVINO's kernels cut the rows into equal parts of these sizes, if possible.
FEWEST, MOST = 8, 64
# A part of this many rows, or of a multiple, fills the tiles of every kernel.
WHOLE = 32
# From this number of rows on, it does not matter how full the last part is.
LARGE = 512


@dataclass(frozen=True)
class FormCosts:
    """Nanoseconds of a product of rows x k times k x n: `call` per call; `mac` for each of rows * k * n, plus `uneven`
    if rows are not a multiple of `WHOLE`, plus `ragged` if no number from `FEWEST` to `MOST` divides them, neither from
    `LARGE` rows on; `weight` for each of k * n, `read` for each of rows * k, `written` for each of rows * n."""

    call: float
    mac: float
    uneven: float
    ragged: float
    weight: float
    read: float
    written: float

    def nanoseconds(self, shape: Shape) -> float:
        return float(np.dot(list(vars(self).values()), _features(shape)))


def _features(shape: Shape) -> list[float]:
    rows, k, n = shape.rows, shape.k, shape.n
    whole = not FEWEST < rows < LARGE or rows % WHOLE == 0
    equal = whole or any(rows % size == 0 for size in range(FEWEST, MOST + 1))
    return [1, shape.macs, 0 if whole else shape.macs, 0 if equal else shape.macs, k * n, rows * k, rows * n]


@dataclass(frozen=True)
class CostTable:
    """The costs of layers on one target, for a class of CPUs.

    `cpus`: the class, or the name of a single CPU; `runtime`: the measured version, "" for a rule; `origin`: a
    description of the source. `element`: nanoseconds per element of a softmax, norm or activation, by the precision of
    float operators; `scaling`: nanoseconds per element that a Mul and an Add after an activation scale, as for hidden
    channels in INT8. `installed`: the installed version of the runtime.
    """

    target: str
    cpus: str
    runtime: str
    origin: str
    forms: dict[str, FormCosts]
    element: dict[str, float]
    scaling: float
    installed: str = ""

    def __str__(self) -> str:
        other = self.runtime and self.installed and self.runtime != self.installed
        versions = f"; measured with {self.runtime}, installed: {self.installed}" if other else ""
        return f"the cost table for {self.cpus} ({self.origin}{versions})"

    def layer(self, shape: Shape, form: Literal["int8"] | HigherForm, rest: FloatRest = "fp32") -> float:
        """Nanoseconds of a layer. A form that is not in the table costs as much as float."""
        name = f"{form} bf16" if rest == "bf16" and form != "int8" else form
        return (self.forms.get(name) or self.forms["float"]).nanoseconds(shape)

    def added(self, shape: Shape, form: HigherForm, rest: FloatRest = "fp32") -> float:
        """The extra nanoseconds of a layer in another form compared with plain INT8."""
        return self.layer(shape, form, rest) - self.layer(shape, "int8")

    def saved(self, shape: Shape) -> float:
        """The nanoseconds that INT8 saves in a layer, at least those of its products. The time of a small layer is
        mostly its call, which the table predicts badly: by the table, float would be faster for any small layer."""
        return max(self.added(shape, "float"), shape.macs * (self.forms["float"].mac - self.forms["int8"].mac))

    def parts(self, shape: Shape, parts: Sequence[int]) -> float:
        """Nanoseconds of a layer in INT8 with its rows in these parts. Weights are read once, and each further part
        costs only the call of a product, the same as in float: this matches measurements of whole models."""
        costs, more = self.forms["int8"], len(parts) - 1
        saved = costs.weight * shape.k * shape.n + max(costs.call - self.forms["float"].call, 0.0)
        return sum(costs.nanoseconds(replace(shape, rows=rows)) for rows in parts) - more * saved

    def between(self, workload: "Workload", rest: FloatRest = "fp32") -> float:
        """Nanoseconds of all other operations: products of two activations, softmax, norms and activations."""
        products = (self.forms.get("float bf16") if rest == "bf16" else None) or self.forms["float"]
        element = self.element.get(rest, self.element["fp32"])
        return workload.products * products.mac + workload.elements * element

    def plain(self, workload: "Workload", rest: FloatRest = "fp32") -> float:
        """Nanoseconds of a model whose layers are all in plain INT8."""
        return sum(self.layer(shape, "int8") for shape in workload.layers.values()) + self.between(workload, rest)

    @property
    def digest(self) -> str:
        """The digest of the costs, for the keys of choices made with them."""
        facts = {**encode(self), "installed": "", "origin": ""}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


# --- The work in a graph that takes time ------------------------------------------------------------------------------


ELEMENTWISE = {"Softmax", "LayerNormalization", "InstanceNormalization", "Gelu", "Erf", "Tanh", "Sigmoid"}


@dataclass(frozen=True)
class Workload:
    """`layers`: the shape of each layer at a batch, with the rows of all images in `Shape.rows`; `products`: the MACs
    of products of two activations; `elements`: the elements of softmax, norms and activations."""

    layers: Mapping[str, Shape]
    products: int
    elements: int


def workload_of(model: ir.Model, batch: int) -> Workload:
    """The work of a graph at a batch size.

    Raises:
        GraphError: as `shapes_of`.
    """
    linears = find_linears(model)
    shapes = shapes_of(model, [linear.name for linear in linears])
    known = {linear.node for linear in linears}
    products = sum(work.node_macs(model, node) or 0 for node in model.graph if node not in known)
    elements = sum(work.elements(model, node) for node in model.graph if node.op_type in ELEMENTWISE)
    layers = {name: replace(shape, rows=batch * shape.rows) for name, shape in shapes.items()}
    return Workload(layers, batch * products, batch * elements)


# --- Select the table: this user's table of this CPU, else the package's table of its class ---------------------------


TABLES_FILE, OWN_FOLDER = Path(__file__).parent / "costs.json", "costs"


def cpu_class(host: Mapping[str, str]) -> str:
    """The class of a CPU for the package's tables, by instruction sets; the two AMD classes also by vendor."""
    isa, amd = set(host.get("isa", "").split()), "AMD" in host.get("cpu", "")
    if "amx_int8" in isa:
        return "CPUs with AMX"
    if "avx512_bf16" in isa and amd:
        return "Zen 5" if "avx_vnni" in isa else "Zen 4"
    if "avx512_vnni" in isa:
        return "CPUs with AVX512-VNNI"
    if isa & VNNI:
        return "CPUs with AVX-VNNI"
    if "i8mm" in isa:
        return "Arm CPUs with i8mm"
    return "Arm CPUs with dot products" if "asimddp" in isa else "other CPUs"


def costs_for(target: str, host: Mapping[str, str] | None = None) -> CostTable:
    """The table for choices on a target. `host`: another machine, as from `describe_host`; by default this machine,
    where the user's own table takes precedence.

    Raises:
        InputError: the user's table cannot be read.
        CapabilityError: the target has no table.
    """
    if host is None and (own := _own(target)).is_file():
        return replace(_read(own), installed=_version(target))
    cpus = cpu_class(describe_host() if host is None else host)
    for table in _shipped():
        if (table.target, table.cpus) == (target, cpus):
            return replace(table, installed=_version(target) if host is None else "")
    _require_tables(target)
    raise AssertionError(f"the package has no costs of {target} for {cpus}")


def has_costs(target: str) -> bool:
    """Whether a table has the costs of layers on a target."""
    return any(table.target == target for table in _shipped())


def _require_tables(target: str) -> None:
    if not has_costs(target):
        known = ", ".join(dict.fromkeys(table.target for table in _shipped()))
        raise CapabilityError(f"no cost table for the target {target}", expected=known)


@functools.cache
def _shipped() -> tuple[CostTable, ...]:
    return tuple(decode(CostTable, table) for table in json.loads(TABLES_FILE.read_text(encoding="utf-8")))


def _own(target: str) -> Path:
    host = describe_host()
    identity = json.dumps({key: host.get(key, "") for key in ("cpu", "isa", "machine", "board")})
    return user_cache() / OWN_FOLDER / f"{target}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"


def _read(file: Path) -> CostTable:
    try:
        table = decode(CostTable, json.loads(file.read_text(encoding="utf-8")))
        if not {"int8", "float"} <= table.forms.keys() or "fp32" not in table.element:
            raise ValueError("the costs of int8, float or elements are missing")
        return table
    except (DecodeError, OSError, ValueError) as error:
        raise InputError(
            f"{file} is not a valid cost table",
            found=str(error)[:300],
            fix="delete it, or measure it again: vitdeploy doctor --measure",
        ) from None


def _version(target: str) -> str:
    package = TARGETS[target].package
    return f"{package} {version}" if (version := installed_version(package)) else ""


# --- Measure the table of this CPU ------------------------------------------------------------------------------------


# Rows, k and n of the layers for comparing forms, and the numbers of rows that are compared.
SHAPES = tuple((rows, k, n) for k, n in ((192, 768), (768, 192), (768, 768), (768, 3072)) for rows in (64, 256))
FEW_ROWS = (8, 768, 768)
ROWS, ROWS_OF = (192, 198, 197), ((192, 768), (768, 192), (768, 3072), (3072, 768))
ACTIVATION = Shape(256, 768, 192, front=("Gelu",))
SCALED = replace(ACTIVATION, front=("Gelu", "Mul", "Add"))
# For each engine, by name: its layer, the form, and the number of layers.
Comparison = Mapping[str, tuple[Shape, Form, int]]
BLOCK_SECONDS, WARMUP_SECONDS, ROUNDS = 0.03, 0.05, 9


def measure_costs(target: str, progress: Progress = silent) -> CostTable:
    """Time single layers on this machine, which takes a minute or two, and store the table for this user.

    Raises:
        CapabilityError: other processes ran meanwhile; the machine is an emulator; or the target has no tables.
        MissingPackageError, EngineError, WorkerError: as `compile_engine`, `measure_candidates`.
    """
    _require_tables(target)
    forms = _forms_of(target)
    shapes = [Shape(*sizes) for sizes in (*SHAPES, FEW_ROWS)]
    bare = replace(ACTIVATION, front=())
    rests: dict[FloatRest, Form] = {"fp32": "float"}
    if "float bf16" in forms:
        rests["bf16"] = "float bf16"
    few, copies = shapes[-1], shapes[-1].copies
    comparisons: list[Comparison] = [{"one": (few, "int8", 1), "many": (few, "int8", copies)}]
    comparisons += [{form: (shape, form, shape.copies) for form in forms} for shape in shapes]
    comparisons += [
        {str(rows): (shape, "int8", shape.copies) for rows in ROWS for shape in [Shape(rows, *sizes)]}
        for sizes in ROWS_OF
    ]
    comparisons += [
        {"bare": (bare, form, bare.copies), "activation": (ACTIVATION, form, bare.copies)} for form in rests.values()
    ]
    comparisons.append({"activation": (ACTIVATION, "int8", bare.copies), "scaled": (SCALED, "int8", bare.copies)})
    with run.alone(progress):
        times = [_times(target, pair) for pair in frame.counted(comparisons, f"benchmark layers on {target}", progress)]
    # The fixed time of an engine run.
    runs = max(times[0]["one"] - times[0]["many"] / copies, 0.0) * copies / (copies - 1)
    by_shape = [
        {form: max(time - runs, 0.1 * time) / shape.copies for form, time in by_form.items()}
        for shape, by_form in zip(shapes, times[1:], strict=False)
    ]
    *by_rest, scaled = times[-len(rests) - 1 :]
    by_rows = times[1 + len(shapes) : -len(rests) - 1]
    fitted, element = _fitted(forms, shapes, by_shape, by_rows), {}
    for (rest, form), pair in zip(rests.items(), by_rest, strict=True):
        more = max(pair["activation"] / pair["bare"] - 1, 0.01) * fitted[form].nanoseconds(bare)
        element[str(rest)] = _rounded(more / (bare.rows * bare.k))
    more = max(scaled["scaled"] / scaled["activation"] - 1, 0.0) * fitted["int8"].nanoseconds(bare)
    scaling = _rounded(more / (bare.rows * bare.k))
    host, version = describe_host(), _version(target)
    origin = f"measured {frame.now()[:10]} on {host['cpu']}, {host['cores']} cores, {version}"
    table = CostTable(target, cpu_class(host), version, origin, fitted, element, scaling)
    own = _own(target)
    own.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(own, (json.dumps(encode(table), indent=1) + "\n").encode(), 0o600)
    return replace(table, installed=version)


def _forms_of(target: str) -> list[Form]:
    """The forms that the runtime supports on this CPU."""
    dynamic, half = has_dynamic(target, describe_host()), COMPILE[target].half_rest()
    available: dict[Form, bool] = {
        "int8": True, "float": True, "dynamic": dynamic, "float bf16": half, "dynamic bf16": dynamic and half
    }  # fmt: skip
    return [form for form, there in available.items() if there]


def has_dynamic(target: str, host: Mapping[str, str]) -> bool:
    """Whether the runtime supports dynamic quantization on a CPU."""
    return QUANTIZE[target].dynamic is not None and bool(VNNI & set(host.get("isa", "").split()))


def _times(target: str, comparison: Comparison) -> dict[str, float]:
    """Nanoseconds per run of engines in alternating blocks, by name.

    Raises:
        CapabilityError: the machine was disturbed.
    """
    with (
        tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder,
        run.started(dict.fromkeys(comparison, run.ENGINE_WORKER)) as workers,
    ):
        engines = [_engine(target, name, *layers, Path(folder)) for name, layers in comparison.items()]
        protocol = Protocol.of_singles(BLOCK_SECONDS, WARMUP_SECONDS, ROUNDS)
        bench_run = run.measure_candidates(engines, workers, protocol)
    if reason := summary.disturbed_reason(bench_run):
        raise CapabilityError(
            "the machine is too busy to measure costs",
            found=reason.removesuffix(f": {summary.MEASURE_AGAIN}"),
            expected="no other load on the machine",
            fix="run `vitdeploy doctor --measure` again later; until then builds use the costs of this class of CPUs",
        )
    medians = summary.block_medians(bench_run)
    return {name: 1e6 * float(np.median(medians[name])) for name in comparison}


def _engine(target: str, name: str, shape: Shape, form: Form, copies: int, folder: Path) -> run.BenchCandidate:
    """An engine of several equal layers."""
    model, kind = layer_graph(shape, copies), form.split()[0]
    rest: FloatRest = "bf16" if form.endswith("bf16") else "fp32"
    precision: Precision = rest if kind == "float" else "int8"
    linears = find_linears(model)
    if kind != "float":
        precisions = (
            [LayerPrecision(linear.name, "dynamic", DYNAMIC) for linear in linears] if kind == "dynamic" else []
        )
        place(model, {str(linear.input.name): BOUNDS for linear in linears}, target, asked=precisions)
    save_graph(model, folder / f"{name}.onnx")
    engine = frame.engine_of(model, folder / f"{name}.onnx", folder / name, target, precision, 1, rest)
    return run.engine_candidate(engine, folder / name, name)


def _fitted(
    forms: Sequence[Form],
    shapes: Sequence[Shape],
    by_shape: Sequence[Mapping[str, float]],
    by_rows: Sequence[Mapping[str, float]],
) -> dict[str, FormCosts]:
    """The costs of each form. The clock of a CPU changes between layers, not between forms: so plain INT8 is fitted to
    times, and the others to their ratios to it."""
    even, uneven, ragged = (np.array([times[str(rows)] / rows for times in by_rows]) for rows in ROWS)
    shares = max(float((uneven / even).mean()) - 1, 0.0), max(float((ragged / uneven).mean()) - 1, 0.0)
    features = np.array([_features(shape) for shape in shapes])[:, [0, 1, 4, 5, 6]]
    plain = np.array([times["int8"] for times in by_shape])
    fitted: dict[str, FormCosts] = {}
    for form in forms:
        times = np.array([by_form[form] for by_form in by_shape])
        if fitted:
            times = times / plain * np.array([fitted["int8"].nanoseconds(shape) for shape in shapes])
        call, mac, weight, read, written = nnls(features / times[:, None], np.ones(len(times)))[0]
        costs = (call, mac, mac * shares[0], mac * (1 + shares[0]) * shares[1], weight, read, written)
        fitted[form] = FormCosts(*map(_rounded, costs))
    return fitted


def _rounded(number: float) -> float:
    """Round to three significant digits; further digits are noise."""
    return float(f"{number:.3g}")
