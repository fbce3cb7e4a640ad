"""Every option, once: a field of the dataclass of its function or command (see `api.option`).

Annotations are evaluated: no future import.
"""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from vitdeploy.api.option import Option, Options, advanced, option, required
from vitdeploy.backends import TARGETS
from vitdeploy.errors import InputError
from vitdeploy.spec import MAX_BATCH, LabelKind, Precision, Task

if TYPE_CHECKING:
    from vitdeploy.api.artifacts import ArtifactLike, Bundle, GraphLike, Model, ModelLike
    from vitdeploy.api.images import ImagesLike
    from vitdeploy.api.values import Reporter
    from vitdeploy.compilation.backend import BuildOptions
    from vitdeploy.models.source import Source
    from vitdeploy.recipe.recipe import Recipe

# --- Options shared by several functions ------------------------------------------------------------------------------

GRAPH = "a graph from `export` or `quantize`, its folder, or an ONNX file."
IMAGES = "images, as `vitdeploy.images` takes them, best with labels."
RECIPE = Option(doc="a YAML file, or a loaded recipe.", kind="path", place="one")
PROGRESS = Option(doc="show progress on standard error, or as a bar in a notebook.")
SKIP_BAD = Option("Skip unreadable images and count them.", advanced=True)
SEED = Option("Seed for the choice of images.", min=0, max=2**32 - 1, advanced=True)
RESUME = Option("Reuse finished stages of earlier runs.", flag="--resume/--no-resume", advanced=True)
JOBS = Option(
    "Number of parallel workers (local processes without --executor). Default: one per core or CPU.",
    min=1,
    advanced=True,
)
EXECUTOR = Option(doc="as for `vitdeploy.deploy`.", metavar="processes|ray[:HOST:PORT]", advanced=True)
BY_EXECUTOR = "in local processes or on a Ray cluster."
TRUST = Option(
    "Accept only bundles signed with this public key or certificate (PEM); see `vitdeploy bundle sign`.",
    kind="path",
    metavar="FILE",
    advanced=True,
)
EXPECT_DIGEST = Option(
    "Accept only the bundle whose manifest.json has this SHA-256; `vitdeploy bundle verify` prints it.",
    kind="digest",
    metavar="sha256:HEX",
    advanced=True,
)
ACCEPT_KNOWN_BAD = Option(
    "Compile even if this entry of the known-bad table matches the graph. Repeatable.", metavar="ID", advanced=True
)
ON = Option(
    "Run on these devices: names or labels from `vitdeploy devices list`, or local.",
    complete="devices",
    metavar="DEVICE[,DEVICE]",
)
MADE_FOR = Option("Target, such as openvino-cpu or tensorrt; `vitdeploy doctor` lists all.", complete="targets")
WHICH_ENGINE = Option(
    "Engine of a bundle, by target or name, or the target to compile a graph for.", complete="targets"
)
FIRST_ENGINE = Option("Engine to use, by target or name; auto: the first that works here.", complete="targets")
DURATION = Option("Benchmark time in seconds per artifact and scenario.", min=0, above=True, max=3600)
TRACKERS = Option(
    "Send each result to mlflow[:URI], wandb[:[ENTITY/]PROJECT] or bencher:FILE. Repeatable.",
    flag="--report-to",
    metavar="TRACKER",
    advanced=True,
)
OWN_MODEL = Option(
    "Your own torch.nn.Module, for a recipe that names no model.", flag="--model", metavar="PACKAGE.MODULE:FUNCTION"
)
OVERRIDES = Option("Override a field of the recipe. Repeatable.", flag="--set", metavar="A.B=VALUE")
OUTPUT = Option(
    doc="folder for the result. Default: a temporary folder, removed when this process ends.",
    flag="-o --output",
    kind="path",
    required=True,
)


@dataclass(frozen=True)
class Labelled(Options):
    """The location of the labels of the --data images."""

    labels: LabelKind | None = option(
        None, "Source of the labels. Default: class folders, or the labels in tars, tables and lists."
    )
    annotations: Path | None = option(
        None,
        "Annotations: YOLO folder, COCO JSON file, folder of maps, JSON list of texts or prompts, or a table.",
    )
    inputs: Path | None = advanced(
        None, "Folder with further model inputs: NAME/STEM.npy or .png for each image.", metavar="DIR"
    )


@dataclass(frozen=True)
class Described(Labelled):
    """`Labelled`, and texts for models that compare images with them."""

    texts: Path | None = advanced(None, "File of texts, one per line, for models that take texts.")
    template: str | None = advanced(
        None, "Template that turns a class folder's name into a text, such as 'a photo of a {}.'.", metavar="TEXT"
    )


@dataclass(frozen=True)
class Recorded(Options):
    """Where a result is recorded."""

    history: str | None = advanced(  # not a path: it may be a URI
        None,
        "Add the result to this history as one new file; `vitdeploy history` reads it.",
        metavar="DIR-or-URI",
    )
    trackers: Sequence[str] = option((), TRACKERS)


@dataclass(frozen=True)
class RecordedBundle(Recorded):
    report_bundle: bool = advanced(False, "Also send the bundle to the trackers of --report-to.")


@dataclass(frozen=True)
class Pinned(Options):
    expect_digest: str | None = option(None, EXPECT_DIGEST)


@dataclass(frozen=True)
class There(Options):
    """The devices that a command runs on, and the only bundle that it accepts."""

    on: str | None = option(None, ON)
    expect_digest: str | None = option(None, EXPECT_DIGEST)


@dataclass(frozen=True)
class SourceOptions(Options):
    """The command-line options that describe a model, besides its name: keywords of `vitdeploy.model`."""

    checkpoint: Path | None = option(None, "Weights: .safetensors, .pt/.pth with plain weights, or JAX .npz.")
    image_size: tuple[int, int] | None = option(
        None, "Image size: 384, or 256x320 (HxW). Default: the checkpoint's.", kind="size"
    )
    heads: int | None = advanced(None, "Number of attention heads. Default: from the config file.", min=1)
    text_features: Path | None = advanced(None, "Text features for zero-shot models: .npy, float32 [classes, width].")
    function: str | None = option(None, "Your own torch.nn.Module.", flag="--model", metavar="PACKAGE.MODULE:FUNCTION")
    task: Task | None = advanced(None, "Task of the model, if its outputs do not identify it.")
    normal: Path | None = advanced(None, "For --task anomaly: images of good parts, or a folder of MVTec AD.")
    bind: Sequence[str] = advanced(
        (),
        "Bind a further input of an .onnx file or of your own module to a constant: a number, comma-separated numbers, "
        "a .npy or .npz file; NAME=input: each image brings its own value.",
        metavar="NAME=VALUE",
    )

    def to_source(self, model: str | None = None) -> "Source":
        from vitdeploy.models.source import Source

        return Source(model=model, **{each.name: getattr(self, each.name) for each in fields(SourceOptions)})


# --- Each step alone --------------------------------------------------------------------------------------------------

REWRITES = (
    "fold_layer_scale",
    "fold_attention_scale",
    "drop_key_bias",
    "fold_value_bias",
    "fold_image_normalisation",
    "class_token_only",
)


@dataclass(frozen=True)
class ExportOptions(SourceOptions):
    """The options of `vitdeploy export`, which can also export the model of a recipe."""

    image_size: Sequence[tuple[int, int]] = option(  # type: ignore[assignment]
        (),
        "Image size: 384, or 256x320 (HxW). Repeat for one graph per size. Default: the checkpoint's.",
        kind="size",
    )
    source: Sequence[str] = option((), "", place="many", complete="models")
    folder: Path | None = option(None, OUTPUT, help="Folder for model.onnx.", required=False)
    labels: Path | None = option(None, "File of class names, one per line.")
    opset: Literal["18", "19", "20"] | None = advanced(None, "ONNX opset. Default: the recipe's, else 20.")
    batch: str | None = option(
        None, "Batch size: a number, or dynamic. Default: the ONNX file's or the recipe's, else dynamic."
    )
    no_preprocess: bool = advanced(False, "Omit preprocessing: the graph takes normalised float NCHW, not uint8 NHWC.")


@dataclass(frozen=True)
class Optimize(Options):
    graph: "GraphLike" = field(metadata=required(doc=GRAPH, kind="path", place="one"))
    folder: str | Path | None = option(None, OUTPUT, help="Folder for the rewritten graph.")
    _: KW_ONLY
    without: Sequence[str] = option((), f"Rewrite to skip: {', '.join(REWRITES)}.", kind="rewrite", metavar="REWRITE")
    qkv: Literal["keep", "merged", "separate"] = option("keep", "Compute query, key and value in one linear or three.")
    rotate_residual: bool = option(False, "Rotate the channels of the residual stream (exact).")
    merge_tokens: Mapping[int, int] | None = option(
        None,
        "Merge similar tokens after this block's attention until TOKENS are left (not exact). Repeatable.",
        doc="by block, the number of tokens to keep after its attention; not exact.",
        kind="merging",
        metavar="BLOCK:TOKENS",
    )
    image_size: tuple[int, int] | None = option(
        None,
        "Image size for a graph with an open size: 384, or 256x320 (HxW).",
        doc="(height, width), for a file with an open image size.",
        kind="size",
    )
    progress: "bool | Reporter" = option(True, PROGRESS)

    def check(self) -> None:
        if unknown := [name for name in self.without if name not in REWRITES]:
            raise InputError(f"no rewrite is called {', '.join(unknown)}", expected=", ".join(REWRITES))


@dataclass(frozen=True)
class Quantize(Options):
    graph: "GraphLike" = field(
        metadata=required(
            doc="a graph from `export` or `optimize`, its folder, or an ONNX file of a float image model. Facts that "
            "such a file does not contain, such as mean and std, are assumed and reported.",
            kind="path",
            place="one",
        )
    )
    data: "ImagesLike" = field(
        metadata=required(
            "Calibration images, or an .npz of tokens.",
            doc="calibration images, as `vitdeploy.images` takes them, or for an encoder-decoder an .npz of tokens. "
            "Labels are used only as prompts, and as the boxes of objects with key points.",
            kind="path",
        )
    )
    target: str = field(metadata=required(MADE_FOR))
    folder: str | Path | None = option(None, OUTPUT, help="Folder for model.onnx.")
    _: KW_ONLY
    precision: Literal["int8", "mixed", "int4", "fp16", "bf16", "fp8"] = option(
        "int8",
        "Precision. mixed keeps layers in float that cost more accuracy than they save time; int4 applies to weights "
        "only; fp16, bf16 and fp8 are for NVIDIA GPUs.",
    )
    num_samples: int | None = option(128, "Number of calibration images.", doc="how many images; None: all.", min=1)
    vnni: bool | None = advanced(
        None, "Whether the device's CPU has VNNI. Default: as this machine.", flag="--vnni/--no-vnni"
    )
    ignore: Sequence[str] = advanced(
        (),
        "Keep this layer (or pattern with *) in float. Repeatable.",
        doc='names or patterns of layers to keep in float; "graph/layer" for a model of several graphs.',
        metavar="LAYER",
    )
    float_parts: Sequence[str] = advanced(
        (), "Keep this graph of a model of several in float. Repeatable.", flag="--float-part", metavar="GRAPH"
    )
    high_precision: float = advanced(
        5.0,
        "For int8 on a CPU: latency that layers kept in higher precision may add, by a table of costs; 0: none.",
        doc='for "int8" on a CPU: percent of latency that layers kept in higher precision may add if they bring the '
        "answers closer to the float graph's, by a table of costs; 0: none.",
        min=0,
        max=100,
        metavar="PERCENT",
    )
    sensitivity: bool = option(False, "Measure the accuracy cost of each layer; write sensitivity.json and .html.")
    min_agreement: float | None = option(None, "For mixed: percent of answers to keep.", min=0, max=100)
    seed: int = option(0, SEED)
    skip_bad: bool = option(False, SKIP_BAD)
    image_size: tuple[int, int] | None = option(
        None,
        "Image size for a bare .onnx file with an open size: 384, or 256x320 (HxW).",
        doc="(height, width), for a file with an open image size.",
        kind="size",
    )
    executor: str | None = option(None, EXECUTOR, help=f"Process large calibration sets {BY_EXECUTOR}")
    jobs: int = option(0, JOBS)
    progress: "bool | Reporter" = option(True, PROGRESS)

    def check(self) -> None:
        if self.precision != "mixed" and self.min_agreement is not None:
            self.refuse("<min_agreement> needs <precision> mixed.")
        of_int8 = self.vnni is not None or self.sensitivity
        if self.precision == "int4" and of_int8:
            self.refuse("<vnni> and <sensitivity> apply to INT8, not to <precision> int4.")
        if TARGETS[self.target].typed and of_int8:
            self.refuse(f"<vnni> and <sensitivity> apply to CPU targets, not to {self.target}.")


@dataclass(frozen=True)
class Build(Options):
    """TensorRT build options: those of the recipe section `tensorrt`."""

    profiles: Sequence[tuple[int, int, int]] = advanced(
        (),
        "tensorrt: batch sizes to build for. Repeatable. Default: only --batch, and 1 to 8 or more.",
        flag="--profile",
        kind="profile",
        metavar="MIN,OPT,MAX",
    )
    workspace: int | None = advanced(
        None,
        "tensorrt: maximum workspace memory on the device. Default: all free memory.",
        min=1,
        metavar="MIB",
    )
    builder_optimization_level: int | None = advanced(
        None, "tensorrt: optimization level; 0 builds fastest, 5 searches longest. Default: 3.", min=0, max=5
    )
    hardware_compatibility_level: Literal["none", "same-compute-capability", "ampere+"] | None = advanced(
        None, "tensorrt: other GPUs that the engine may run on. Default: none."
    )
    version_compatible: bool | None = advanced(None, "tensorrt: build an engine that later TensorRT releases can run.")


@dataclass(frozen=True)
class Compile(Options):
    graph: "GraphLike" = field(metadata=required(doc=GRAPH, kind="path", place="one"))
    target: str = field(metadata=required(MADE_FOR))
    folder: str | Path | None = option(None, OUTPUT, help="Folder for the engine.")
    _: KW_ONLY
    batch: int | None = option(None, "Batch size to compile for. Default: the graph's, or 1.", min=1, max=MAX_BATCH)
    precision: Literal["fp32", "fp16", "bf16"] | None = option(
        None, "Precision for a float graph. Default: fp32, or the one the graph was prepared for."
    )
    build: "BuildOptions | None" = option(None, "", doc="TensorRT build options.")
    accept_known_bad: Sequence[str] = option((), ACCEPT_KNOWN_BAD)
    split_rows: Literal["auto", "none"] | Sequence[int] = advanced(
        "auto",
        "Token rows of INT8 on openvino-cpu: split, such as 192,5, or padded, such as 200; auto: chosen by the "
        "measured cost on this CPU.",
        kind="rows",
        metavar="auto|none|A,B",
    )
    on: str | None = option(None, ON)
    progress: "bool | Reporter" = option(True, PROGRESS)


# --- Verification and benchmarks --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VerifyOn(Options):
    artifact: "ArtifactLike" = field(
        metadata=required(
            doc="a `Bundle`, a `Graph`, or the path of one; with several engines the first, or the one for `target`.",
            complete="models",
            place="one",
        )
    )
    against: "ArtifactLike" = field(
        metadata=required(
            "The original: a built-in model, a bundle, a folder or an .onnx file.",
            doc="the original: a `Model`, a name, a `torch.nn.Module`, a graph or a bundle.",
            complete="models",
        )
    )
    data: "ImagesLike" = field(metadata=required("Images, ideally with labels, or an .npz.", doc=IMAGES, kind="path"))
    _: KW_ONLY
    target: str | None = option(None, WHICH_ENGINE)
    num_samples: int | None = option(None, "Number of evaluation images. Default: all.", min=1)
    seed: int = option(0, SEED)
    max_drop: float | None = option(None, "Gate: maximum drop of top-1 accuracy, in points.", min=0)
    min_agreement: float | None = option(None, "Gate: minimum percent of equal answers.", min=0, max=100)
    skip_bad: bool = option(False, SKIP_BAD)
    accept_known_bad: Sequence[str] = option((), ACCEPT_KNOWN_BAD)
    trust: str | Path | None = option(None, TRUST)
    progress: "bool | Reporter" = option(True, PROGRESS)


@dataclass(frozen=True)
class Verify(VerifyOn):
    _: KW_ONLY
    emulate: bool = advanced(False, "Emulate the storage types of a graph typed for a GPU, and evaluate it here.")
    executor: str | None = option(
        None,
        EXECUTOR,
        help=f"Evaluate images in shards {BY_EXECUTOR}",
        doc='where shards are evaluated: "processes" on this machine, "ray" (a cluster on this machine) or '
        '"ray:HOST:PORT". None: processes for more than one job, else this process, with worker processes that decode.',
    )
    jobs: int = option(0, JOBS)


@dataclass(frozen=True)
class Bisect(Options):
    artifact: "ArtifactLike"
    against: "ArtifactLike"
    data: "ImagesLike"
    _: KW_ONLY
    target: str | None = option(None, WHICH_ENGINE)
    num_samples: int | None = option(None, "", doc="number of calibration images; None: 32.", min=1)
    seed: int = option(0, SEED)
    skip_bad: bool = option(False, SKIP_BAD)
    progress: "bool | Reporter" = option(True, PROGRESS)


@dataclass(frozen=True)
class Bench(Options):
    artifacts: "Sequence[ArtifactLike]" = field(
        metadata=required(
            doc="bundles (with all their engines), graphs and models, as values, paths or names.",
            complete="models",
            place="many",
        )
    )
    _: KW_ONLY
    target: str | None = option(None, WHICH_ENGINE)
    scenarios: Sequence[str] = option(
        ("single", "offline"),
        "Scenarios: single, offline, server:QPS (Poisson arrivals), sustain:TIME such as sustain:10m.",
        flag="--scenario",
        kind="scenarios",
        default="single,offline",
    )
    batch: Sequence[int] = option((1, 8), "Batch sizes: all scenarios, offline.", kind="batches", default="1,8")
    duration: float = option(
        10.0,
        DURATION,
        help="Seconds per artifact and scenario (at least 12 rounds of half a second); extended up to three times "
        "while the interval of a ratio is wider than 3 %.",
    )
    warmup: float = advanced(0.5, "Minimum warm-up per process, in seconds; it lasts until latency is steady.", min=0)
    percentiles: Sequence[float] = advanced(
        (50.0, 90.0, 99.0), "Latency percentiles to report.", kind="percentiles", default="50,90,99"
    )
    threads: int = option(0, "Engine threads; 0: runtime default.", min=0)
    accept_known_bad: Sequence[str] = option((), ACCEPT_KNOWN_BAD)
    trust: str | Path | None = option(None, TRUST)
    progress: "bool | Reporter" = option(True, PROGRESS)


class BenchKeywords(TypedDict, total=False):
    """The keywords of `Bench`, for type checkers: no dataclass is called with `*artifacts`."""

    target: str | None
    scenarios: Sequence[str]
    batch: Sequence[int]
    duration: float
    warmup: float
    percentiles: Sequence[float]
    threads: int
    accept_known_bad: Sequence[str]
    trust: str | Path | None
    progress: "bool | Reporter"


@dataclass(frozen=True)
class Compare(Options):
    baseline: "Bundle | str | Path" = field(
        metadata=required(doc="a `Bundle`, the path of one, or of a report.json.", kind="path", place="one")
    )
    candidate: "Bundle | str | Path" = field(metadata=required(doc="as `baseline`.", kind="path", place="one"))
    data: "ImagesLike | None" = option(
        None, "Images to run both bundles on, ideally with labels.", doc=IMAGES, kind="path"
    )
    folder: str | Path | None = option(
        None,
        OUTPUT,
        help="Folder for compare.json and compare.html.",
        doc="folder for compare.json and compare.html; None: neither is written.",
        required=False,
    )
    _: KW_ONLY
    max_drop: float | None = option(None, "Gate: maximum drop of accuracy, in points.", min=0)
    max_slowdown: float | None = option(None, "Gate: maximum growth of latency and time per image, in percent.", min=0)
    target: str | None = option(None, "Compare only the engines of this target.", complete="targets")
    duration: float = option(10.0, DURATION, help="Benchmark time in seconds per engine and scenario.")
    bench: bool = option(
        True, "Compare answers only.", doc="measure times; False: compare answers only.", flag="--no-bench"
    )
    skip_bad: bool = option(False, SKIP_BAD)
    junit: str | Path | None = option(None, "Write the checks to this file as JUnit XML.", kind="file")
    trust: str | Path | None = option(None, TRUST)
    progress: "bool | Reporter" = option(True, PROGRESS)


@dataclass(frozen=True)
class VersionsOptions(Options):
    bundle: "Bundle | str | Path" = field(
        metadata=required(
            doc="a `Bundle` or its folder, with golden answers (`run` makes such a bundle).",
            kind="path",
            place="one",
        )
    )
    runtime: str = field(
        metadata=required(
            "Releases: openvino==2025.2..2026.4, or a requirement such as 'onnxruntime>=1.20,<1.32'.",
        )
    )
    _: KW_ONLY
    rebuild: bool = option(False, "Compile the engine's graph with each release, instead of loading the engine.")
    duration: float = option(3.0, DURATION, help="Benchmark time in seconds per release.")
    progress: "bool | Reporter" = option(True, PROGRESS)


# --- From a checkpoint to a bundle ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OfModel(Options):
    """A deployment of a model and images without a recipe: the fields of a recipe, which checks them."""

    source: "ModelLike" = field(metadata=required(doc="a `Model`, or any argument of `vitdeploy.model`."))
    data: "ImagesLike" = field(
        metadata=required(doc="images, as `vitdeploy.images` takes them; split into calibration and evaluation images.")
    )
    folder: str | Path | None = option(None, OUTPUT)
    _: KW_ONLY
    targets: Sequence[str] | None = option(
        None, "", doc='such as ["openvino-cpu"]; None: all CPU targets whose runtimes are installed.'
    )
    max_drop: float | None = option(None, "", doc="maximum drop of top-1 (or the task's metric), in points.")
    min_agreement: float | None = option(None, "", doc="minimum percent of answers equal to the original's.")
    max_latency: float | None = option(None, "", doc="maximum latency in milliseconds (p50, single stream).")
    max_memory: int | None = option(
        None, "", doc="maximum resident set, in bytes, of a process that has loaded the engine and answered once."
    )
    calibration: int | Literal["auto"] = option(
        "auto", "", doc='number of calibration images; "auto": 128, or a quarter if there are fewer than 512.'
    )
    evaluation: int | Literal["all"] = option("all", "", doc="number of evaluation images, from the rest.")
    duration: float = option(10.0, "", doc="benchmark time in seconds per artifact and scenario.")
    seed: int = option(0, "", doc="seed for the choice of images.")
    name: str | None = option(None, "", doc="name of the bundle. Default: the model's.")
    settings: Mapping[str, Any] | None = option(
        None, "", doc='further recipe fields, such as {"optimize": {"qkv": "merged"}}.'
    )
    resume: bool = option(True, RESUME)
    skip_bad: bool = option(False, SKIP_BAD)
    executor: str | None = option(
        None,
        "",
        doc='where stages, variants and large calibration sets are processed: "processes" on this machine, "ray" (a '
        'cluster on this machine) or "ray:HOST:PORT"; None: this process. The result is the same. Measurements always '
        "run here.",
    )
    jobs: int = option(0, "", doc="number of parallel workers; 0: one per core, or per CPU of the cluster.")
    progress: "bool | Reporter" = option(True, PROGRESS)


@dataclass(frozen=True)
class Deploy(OfModel):
    _: KW_ONLY
    precision: Precision = option("int8", "", doc='"fp32", "fp16", "bf16", "int8", "mixed", "int4" or "fp8".')
    max_size: int | None = option(None, "", doc="maximum size of the engine's files, in bytes.")


@dataclass(frozen=True)
class Tune(OfModel):
    _: KW_ONLY
    time_budget: float | None = option(None, "", doc="time limit in seconds; no new variant starts after half of it.")


@dataclass(frozen=True)
class Run(Options):
    recipe: "Recipe | str | Path" = field(metadata=required(RECIPE))
    folder: str | Path | None = option(
        None, OUTPUT, help="Folder for the bundle. Default: out/<recipe's name>.", required=False
    )
    _: KW_ONLY
    function: str | None = option(None, OWN_MODEL)
    overrides: Sequence[str] = option((), OVERRIDES)
    source: "Model | None" = option(None, "", doc="a model in memory, for a recipe that names no model.")
    resume: bool = option(True, RESUME)
    skip_bad: bool = option(False, SKIP_BAD)
    executor: str | None = option(None, EXECUTOR, help=f"Run stages without measurements {BY_EXECUTOR}")
    jobs: int = option(0, JOBS)
    progress: "bool | Reporter" = option(True, PROGRESS)


@dataclass(frozen=True)
class TuneRecipe(Options):
    recipe: "Recipe | str | Path" = field(metadata=required(RECIPE))
    folder: str | Path | None = option(
        None, OUTPUT, help="Folder for the result. Default: out/<recipe's name>-tuned.", required=False
    )
    _: KW_ONLY
    targets: Sequence[str] = option((), "Search only this target. Repeatable.", flag="--target", complete="targets")
    budget: Mapping[str, float | None] | None = option(None, "", doc="bounds that override those of the recipe.")
    time_budget: float | None = option(
        None,
        "Time limit, such as 20m; no new variant starts after half of it. Waiting for other benchmarks is not counted.",
        doc="time limit in seconds; no new variant starts after half of it.",
        kind="duration",
    )
    function: str | None = option(None, OWN_MODEL)
    overrides: Sequence[str] = option((), OVERRIDES)
    source: "Model | None" = option(None, "", doc="a model in memory, for a recipe that names no model.")
    resume: bool = option(True, RESUME)
    skip_bad: bool = option(False, SKIP_BAD)
    executor: str | None = option(None, EXECUTOR, help=f"Build variants (without measurements) {BY_EXECUTOR}")
    jobs: int = option(0, JOBS)
    progress: "bool | Reporter" = option(True, PROGRESS)


@dataclass(frozen=True)
class BudgetOptions(Options):
    """The budget of `vitdeploy tune`: bounds that override the recipe's."""

    max_drop: float | None = option(None, "Maximum drop of accuracy, in points.", min=0)
    min_agreement: float | None = option(None, "Minimum percent of answers equal to the original's.", min=0, max=100)
    max_latency: float | None = option(None, "Maximum latency in ms (p50, single stream).", min=0, above=True)
    max_memory: int | None = option(None, "Maximum peak memory, in bytes, of a process running the engine.", min=1)


@dataclass(frozen=True)
class Sweep(Options):
    recipes: Sequence[str | Path] = field(
        metadata=required(doc="recipe files; a grid file stands for all its recipes.", kind="path", place="many")
    )
    folder: str | Path | None = option(
        None,
        OUTPUT,
        help="Folder for the bundles, sweep.json and sweep.html.",
        doc="folder for the bundles, sweep.json and sweep.html. Default: a temporary folder, removed when this process "
        "ends.",
        default="out/sweep",
    )
    _: KW_ONLY
    function: str | None = option(None, OWN_MODEL)
    overrides: Sequence[str] = option((), OVERRIDES, help="Override a field of every recipe.")
    jobs: int = advanced(1, "Number of recipes processed in parallel. Measurements always run alone.", min=1)
    executor: str | None = option(
        None,
        EXECUTOR,
        help="Process recipes on this machine or on a Ray cluster; --jobs limits the number of parallel tasks.",
        doc='where recipes are processed: "processes" on this machine, "ray" (a cluster on this machine) or '
        '"ray:HOST:PORT". With Ray, `jobs` above 1 limits the parallel tasks; by default one per CPU. Nodes with the '
        'resource "vitdeploy_device" also measure: one recipe at once, and no other work.',
    )
    resume: bool = option(
        True, RESUME, help="Keep the bundles (with measurements) that an earlier sweep finished in OUTPUT."
    )
    minutes: float | None = option(None, "Time limit: start no recipe that would end after it.", min=0, above=True)
    watch: bool = option(False, "Write sweep.html from the start, as a page that reloads itself.")
    skip_bad: bool = option(False, SKIP_BAD)
    progress: "bool | Reporter" = option(True, PROGRESS)
