"""Every option, once: a field of the dataclass of what has it (`api.option` says what that is).

Annotations are evaluated: no future import.
"""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from vitdeploy.api.option import Option, Options, option, required
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

# --- Options that several have ----------------------------------------------------------------------------------------

GRAPH = "of `export` or `quantize`, its folder, or an ONNX file."
IMAGES = "images, as `vitdeploy.images` takes them, best with labels."
RECIPE = Option(doc="a YAML file, or a recipe that was read.", kind="path", place="one")
PROGRESS = Option(doc="shown on standard error or as a bar in a notebook; False for silence.")
SKIP_BAD = Option("Go on without unreadable images, and count them.")
SEED = Option("Choice of the images.", min=0, max=2**32 - 1)
RESUME = Option("Reuse finished stages of earlier runs.", flag="--resume/--no-resume")
JOBS = Option(
    "How many pieces of that at a time, by processes without --executor. Default: one for each core or CPU.", min=1
)
EXECUTOR = Option(doc="as for `vitdeploy.deploy`.", metavar="processes|ray[:HOST:PORT]")
BY_EXECUTOR = "by processes of this machine, or on a Ray cluster."
TRUST = Option(
    "Take bundles only if signed by this public key or certificate (PEM), as `vitdeploy bundle sign` does.",
    kind="path",
    metavar="FILE",
)
EXPECT_DIGEST = Option(
    "Refuse any other bundle: the SHA-256 of its manifest.json, as `vitdeploy bundle verify` prints it.",
    kind="digest",
    metavar="sha256:HEX",
)
ACCEPT_KNOWN_BAD = Option(
    "Compile although this entry of the table of runtimes known to be wrong is about the graph.", metavar="ID"
)
ON = Option(
    "Run there: names or labels of `vitdeploy devices list`, or local.", complete="devices", metavar="DEVICE[,DEVICE]"
)
MADE_FOR = Option("As `vitdeploy doctor` lists them: openvino-cpu, tensorrt ...", complete="targets")
WHICH_ENGINE = Option(
    "Which engine of a bundle, by target or name, or what a graph is compiled for.", complete="targets"
)
FIRST_ENGINE = Option("Which engine, by target or name; auto takes the first that works here.", complete="targets")
DURATION = Option("Seconds an artifact and scenario of the bench.", min=0, above=True, max=3600)
TRACKERS = Option(
    "Send to mlflow[:URI], wandb[:[ENTITY/]PROJECT] or bencher:FILE, once for each result.",
    flag="--report-to",
    metavar="TRACKER",
)
OWN_MODEL = Option(
    "Your own torch.nn.Module, in a recipe that names no model.", flag="--model", metavar="PACKAGE.MODULE:FUNCTION"
)
OVERRIDES = Option("Override a field of the recipe.", flag="--set", metavar="A.B=VALUE")
OUTPUT = Option(
    doc="of the result; by default a temporary one that lasts as long as this process.",
    flag="-o --output",
    kind="path",
    required=True,
)


@dataclass(frozen=True)
class Labelled(Options):
    """Where the labels of the images of --data are."""

    labels: LabelKind | None = option(
        None, "Where labels come from. Default: class folders, or what tars, tables and lists bring."
    )
    annotations: Path | None = option(
        None,
        "YOLO's folder, COCO's JSON file, the folder of maps, the JSON list of texts or prompts, or a table.",
    )
    inputs: Path | None = option(
        None, "For models that take more than an image: the folder with NAME/STEM.npy or .png for each.", metavar="DIR"
    )


@dataclass(frozen=True)
class Described(Labelled):
    """The same, and texts for models that compare images with them."""

    texts: Path | None = option(None, "For models that take texts: a file, one a line.")
    template: str | None = option(
        None, "What makes a class folder's name a text, as 'a photo of a {}.'.", metavar="TEXT"
    )


@dataclass(frozen=True)
class Recorded(Options):
    """What else becomes of a result."""

    history: str | None = option(  # not a path: a URI is none
        None,
        "Add the result to this history, as one new file; `vitdeploy history` reads it.",
        metavar="DIR-or-URI",
    )
    trackers: Sequence[str] = option((), TRACKERS)


@dataclass(frozen=True)
class RecordedBundle(Recorded):
    report_bundle: bool = option(False, "Send the bundle too, with --report-to.")


@dataclass(frozen=True)
class Pinned(Options):
    expect_digest: str | None = option(None, EXPECT_DIGEST)


@dataclass(frozen=True)
class There(Options):
    """Where a command runs instead of here, and which bundle it takes alone."""

    on: str | None = option(None, ON)
    expect_digest: str | None = option(None, EXPECT_DIGEST)


@dataclass(frozen=True)
class SourceOptions(Options):
    """What the command line says of a model beside its name: keywords of `vitdeploy.model`."""

    checkpoint: Path | None = option(None, "Weights: .safetensors, .pt/.pth with plain weights, or JAX's .npz.")
    image_size: tuple[int, int] | None = option(
        None, "Other than the checkpoint's: 384, or 256x320 (HxW).", kind="size"
    )
    heads: int | None = option(None, "Attention heads, where no config file says it.", min=1)
    text_features: Path | None = option(None, "Zero-shot: .npy, float32 [classes, width].")
    function: str | None = option(None, "Your own torch.nn.Module.", flag="--model", metavar="PACKAGE.MODULE:FUNCTION")
    task: Task | None = option(None, "What the outputs are to be taken for, where they do not say it.")
    normal: Path | None = option(None, "Images of good parts, or MVTec AD's folder of them: for --task anomaly.")
    bind: Sequence[str] = option(
        (),
        "A further input of an .onnx file, or of your own module, becomes a constant: a number, numbers with commas, a "
        ".npy or .npz; input: each image brings its own.",
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
    """Of `vitdeploy export`, which exports what a recipe says too."""

    image_size: Sequence[tuple[int, int]] = option(  # type: ignore[assignment]
        (),
        "Other than the checkpoint's: 384, or 256x320 (HxW). Each one given makes a graph of its own.",
        kind="size",
    )
    source: Sequence[str] = option((), "", place="many", complete="models")
    folder: Path | None = option(None, OUTPUT, help="Folder for model.onnx.", required=False)
    labels: Path | None = option(None, "Class names, one a line.")
    opset: Literal["18", "19", "20"] | None = option(None, "Default: 20, or the recipe's.")
    batch: str | None = option(
        None, "A fixed batch, or dynamic. Default: an ONNX file's own, the recipe's, else dynamic."
    )
    no_preprocess: bool = option(False, "Take normalised float NCHW instead of uint8 NHWC images.")


@dataclass(frozen=True)
class Optimize(Options):
    graph: "GraphLike" = field(metadata=required(doc=GRAPH, kind="path", place="one"))
    folder: str | Path | None = option(None, OUTPUT, help="Folder for the rewritten graph.")
    _: KW_ONLY
    without: Sequence[str] = option((), f"Leave out: {', '.join(REWRITES)}.", kind="rewrite", metavar="REWRITE")
    qkv: Literal["keep", "merged", "separate"] = option("keep", "Query, key and value as one linear or three.")
    rotate_residual: bool = option(False, "Rotate the channels of the residual stream. Exact.")
    merge_tokens: Mapping[int, int] | None = option(
        None,
        "Merge similar tokens behind a block's attention until TOKENS are left. Not exact. Repeatable.",
        doc="by block, how many tokens remain behind its attention; not exact.",
        kind="merging",
        metavar="BLOCK:TOKENS",
    )
    image_size: tuple[int, int] | None = option(
        None,
        "Where the graph leaves it open: 384, or 256x320 (HxW).",
        doc="(height, width), where the file leaves it open.",
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
            doc="from `export` or `optimize`, its folder, or an ONNX file of a float image model. What such a file "
            "does not contain, such as mean and std, is assumed and reported.",
            kind="path",
            place="one",
        )
    )
    data: "ImagesLike" = field(
        metadata=required(
            "Calibration images, or an .npz of tokens.",
            doc="calibration images, as `vitdeploy.images` takes them; of an encoder-decoder an .npz of tokens. Labels "
            "are used where they say more than the image: prompts, and the boxes of objects with key points.",
            kind="path",
        )
    )
    target: str = field(metadata=required(MADE_FOR))
    folder: str | Path | None = option(None, OUTPUT, help="Folder for model.onnx.")
    _: KW_ONLY
    precision: Literal["int8", "mixed", "int4", "fp16", "bf16", "fp8"] = option(
        "int8",
        "mixed leaves in float what costs more answers than it saves time; int4 is of weights alone; the last three "
        "are for NVIDIA GPUs.",
    )
    num_samples: int | None = option(128, "Calibration images.", doc="of the images, by `seed`; None: all.", min=1)
    vnni: bool | None = option(
        None, "Whether the device's CPU has VNNI. Default: as this machine's.", flag="--vnni/--no-vnni"
    )
    ignore: Sequence[str] = option(
        (),
        "Leave this layer (or pattern with *) in float.",
        doc='names or patterns of layers to leave in float; of a model of several graphs as "graph/layer".',
        metavar="LAYER",
    )
    float_parts: Sequence[str] = option(
        (), "Leave this graph of a model of several in float.", flag="--float-part", metavar="GRAPH"
    )
    high_precision: float = option(
        5.0,
        "What layers out of plain INT8 may add to the latency, by a table of costs; 0: none.",
        doc='for "int8" on a CPU, percent of the latency that layers out of plain INT8 may add where they bring the '
        "answers nearer to the float graph's, by a table of costs; 0: none.",
        min=0,
        max=100,
        metavar="PERCENT",
    )
    sensitivity: bool = option(False, "Say what each layer costs: sensitivity.json and .html.")
    min_agreement: float | None = option(None, "For mixed: percent of the answers that are to stay.", min=0, max=100)
    seed: int = option(0, SEED)
    skip_bad: bool = option(False, SKIP_BAD)
    image_size: tuple[int, int] | None = option(
        None,
        "Where a bare .onnx file leaves it open: 384, or 256x320 (HxW).",
        doc="(height, width), where the file leaves it open.",
        kind="size",
    )
    executor: str | None = option(None, EXECUTOR, help=f"Where many calibration images are observed: {BY_EXECUTOR}")
    jobs: int = option(0, JOBS)
    progress: "bool | Reporter" = option(True, PROGRESS)

    def check(self) -> None:
        if self.precision != "mixed" and self.min_agreement is not None:
            self.refuse("<min_agreement> needs <precision> mixed.")
        of_int8 = self.vnni is not None or self.sensitivity
        if self.precision == "int4" and of_int8:
            self.refuse("<vnni> and <sensitivity> are of INT8, not of <precision> int4.")
        if TARGETS[self.target].typed and of_int8:
            self.refuse(f"<vnni> and <sensitivity> are for the targets of the CPU, not for {self.target}.")


@dataclass(frozen=True)
class Build(Options):
    """How TensorRT builds: the options of a recipe's section `tensorrt`."""

    profiles: Sequence[tuple[int, int, int]] = option(
        (),
        "tensorrt: batches to build for; as often as needed. Default: just --batch, and 1 to 8 or more.",
        flag="--profile",
        kind="profile",
        metavar="MIN,OPT,MAX",
    )
    workspace: int | None = option(
        None,
        "tensorrt: the most device memory that kernels may work in. Default: what is free.",
        min=1,
        metavar="MIB",
    )
    builder_optimization_level: int | None = option(
        None, "tensorrt: 0 builds fastest, 5 searches longest. Default: 3.", min=0, max=5
    )
    hardware_compatibility_level: Literal["none", "same-compute-capability", "ampere+"] | None = option(
        None, "tensorrt: the GPUs that the engine may run on beside this one. Default: none."
    )
    version_compatible: bool | None = option(None, "tensorrt: the engine also runs on later releases of TensorRT.")


@dataclass(frozen=True)
class Compile(Options):
    graph: "GraphLike" = field(metadata=required(doc=GRAPH, kind="path", place="one"))
    target: str = field(metadata=required(MADE_FOR))
    folder: str | Path | None = option(None, OUTPUT, help="Folder for the engine.")
    _: KW_ONLY
    batch: int | None = option(None, "The batch to compile at. Default: the graph's own, or 1.", min=1, max=MAX_BATCH)
    precision: Literal["fp32", "fp16", "bf16"] | None = option(
        None, "For a float graph. Default: fp32, or what the graph was placed for."
    )
    build: "BuildOptions | None" = option(None, "", doc="how TensorRT builds.")
    accept_known_bad: Sequence[str] = option((), ACCEPT_KNOWN_BAD)
    split_rows: Literal["auto", "none"] | Sequence[int] = option(
        "auto",
        "How INT8 on openvino-cpu computes the rows of its tokens: in parts, such as 192,5, or more, such as 200; "
        "auto: by what layers cost on this CPU.",
        kind="rows",
        metavar="auto|none|A,B",
    )
    on: str | None = option(None, ON)
    progress: "bool | Reporter" = option(True, PROGRESS)


# --- What is measured and judged --------------------------------------------------------------------------------------


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
    data: "ImagesLike" = field(metadata=required("Images, best with labels; or an .npz.", doc=IMAGES, kind="path"))
    _: KW_ONLY
    target: str | None = option(None, WHICH_ENGINE)
    num_samples: int | None = option(None, "Evaluate on this many images. Default: all.", min=1)
    seed: int = option(0, SEED)
    max_drop: float | None = option(None, "Gate: points of top-1 that may be lost.", min=0)
    min_agreement: float | None = option(None, "Gate: percent of equal answers.", min=0, max=100)
    skip_bad: bool = option(False, SKIP_BAD)
    accept_known_bad: Sequence[str] = option((), ACCEPT_KNOWN_BAD)
    trust: str | Path | None = option(None, TRUST)
    progress: "bool | Reporter" = option(True, PROGRESS)


@dataclass(frozen=True)
class Verify(VerifyOn):
    _: KW_ONLY
    emulate: bool = option(False, "Evaluate a graph typed for a GPU here, with its types' storage.")
    executor: str | None = option(
        None,
        EXECUTOR,
        help=f"Where images are evaluated, in shards: {BY_EXECUTOR}",
        doc='where shards are evaluated: by "processes" of this machine, on a cluster of "ray" on it, or '
        '"ray:HOST:PORT". None: by processes for more than one job, else in this process, which has others that decode '
        "for it.",
    )
    jobs: int = option(
        0,
        "How many shards at a time, by processes without --executor. Default: one for each core or CPU.",
        min=1,
    )


@dataclass(frozen=True)
class Bisect(Options):
    artifact: "ArtifactLike"
    against: "ArtifactLike"
    data: "ImagesLike"
    _: KW_ONLY
    target: str | None = option(None, WHICH_ENGINE)
    num_samples: int | None = option(None, "", doc="of the calibration images; None: 32.", min=1)
    seed: int = option(0, SEED)
    skip_bad: bool = option(False, SKIP_BAD)
    progress: "bool | Reporter" = option(True, PROGRESS)


@dataclass(frozen=True)
class Bench(Options):
    artifacts: "Sequence[ArtifactLike]" = field(
        metadata=required(
            doc="bundles (with all their engines), graphs, and models, as values, paths or names.",
            complete="models",
            place="many",
        )
    )
    _: KW_ONLY
    target: str | None = option(None, WHICH_ENGINE)
    scenarios: Sequence[str] = option(
        ("single", "offline"),
        "single, offline, server:QPS (Poisson arrivals), sustain:TIME such as sustain:10m.",
        flag="--scenario",
        kind="scenarios",
        default="single,offline",
    )
    batch: Sequence[int] = option((1, 8), "Batch of all scenarios, batch of offline.", kind="batches", default="1,8")
    duration: float = option(
        10.0,
        DURATION,
        help="Seconds an artifact and scenario (at least 12 rounds of half a second); up to three times that while the "
        "interval of a ratio reaches further than 3 %.",
    )
    warmup: float = option(0.5, "Least seconds of warm-up in each process; it goes on until latency is steady.", min=0)
    percentiles: Sequence[float] = option(
        (50.0, 90.0, 99.0), "Percentiles of latency.", kind="percentiles", default="50,90,99"
    )
    threads: int = option(0, "0: each runtime's own choice.", min=0)
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
    candidate: "Bundle | str | Path" = field(metadata=required(doc="likewise.", kind="path", place="one"))
    data: "ImagesLike | None" = option(
        None, "Images, best with labels, that both bundles answer.", doc=IMAGES, kind="path"
    )
    folder: str | Path | None = option(
        None,
        OUTPUT,
        help="Write compare.json and compare.html here.",
        doc="where compare.json and compare.html are written; None writes neither.",
        required=False,
    )
    _: KW_ONLY
    max_drop: float | None = option(None, "Gate: points of accuracy that may be lost.", min=0)
    max_slowdown: float | None = option(None, "Gate: percent by which latency and time per image may grow.", min=0)
    target: str | None = option(None, "Compare the engines of this target only.", complete="targets")
    duration: float = option(10.0, DURATION, help="Seconds an engine and scenario of the bench.")
    bench: bool = option(
        True, "Compare answers alone.", doc="measure times; without it answers alone are compared.", flag="--no-bench"
    )
    skip_bad: bool = option(False, SKIP_BAD)
    junit: str | Path | None = option(None, "Write the checks as JUnit's XML to this file.", kind="file")
    trust: str | Path | None = option(None, TRUST)
    progress: "bool | Reporter" = option(True, PROGRESS)


@dataclass(frozen=True)
class VersionsOptions(Options):
    bundle: "Bundle | str | Path" = field(
        metadata=required(
            doc="a `Bundle` or its folder; it needs golden answers, which a bundle of `run` has.",
            kind="path",
            place="one",
        )
    )
    runtime: str = field(
        metadata=required(
            "openvino==2025.2..2026.4, or a requirement such as 'onnxruntime>=1.20,<1.32'.", metavar="RELEASES"
        )
    )
    _: KW_ONLY
    rebuild: bool = option(False, "Compile the engine's graph with each release. Default: load the engine.")
    duration: float = option(3.0, DURATION, help="Seconds in which each release is measured.")
    progress: "bool | Reporter" = option(True, PROGRESS)


# --- From a checkpoint to a bundle ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OfModel(Options):
    """What a model and images are made into, without a recipe: its fields, which the recipe checks."""

    source: "ModelLike" = field(metadata=required(doc="a `Model`, or what `vitdeploy.model` takes."))
    data: "ImagesLike" = field(
        metadata=required(doc="images, as `vitdeploy.images` takes them: some calibrate, the others are judged on.")
    )
    folder: str | Path | None = option(None, OUTPUT)
    _: KW_ONLY
    targets: Sequence[str] | None = option(
        None, "", doc='such as ["openvino-cpu"]; None: all of the CPU whose runtimes are installed.'
    )
    max_drop: float | None = option(None, "", doc="points of top-1 (or the task's metric) that may be lost at most.")
    min_agreement: float | None = option(None, "", doc="percent of the original's answers, at least.")
    max_latency: float | None = option(None, "", doc="milliseconds, p50 of a single stream.")
    max_memory: int | None = option(
        None, "", doc="bytes, the largest resident set of a process that has loaded the engine and answered once."
    )
    calibration: int | Literal["auto"] = option(
        "auto", "", doc='how many images calibrate; "auto": 128, or a quarter of fewer than 512.'
    )
    evaluation: int | Literal["all"] = option("all", "", doc="how many of the others are judged on.")
    duration: float = option(10.0, "", doc="seconds of measurement for each artifact and scenario.")
    seed: int = option(0, "", doc="of the choice of images.")
    name: str | None = option(None, "", doc="of the bundle; by default the model's.")
    settings: Mapping[str, Any] | None = option(
        None, "", doc='further fields, as a recipe has them: {"optimize": {"qkv": "merged"}}.'
    )
    resume: bool = option(True, RESUME)
    skip_bad: bool = option(False, SKIP_BAD)
    executor: str | None = option(
        None,
        "",
        doc='where stages or variants are made, and many calibration images are observed: by "processes" of this '
        'machine, on a cluster of "ray" on it, or "ray:HOST:PORT"; None: in this process. The result is the same. What '
        "is measured is measured here.",
    )
    jobs: int = option(0, "", doc="how many of these at a time; 0: one for each core, or for each CPU of the cluster.")
    progress: "bool | Reporter" = option(True, PROGRESS)


@dataclass(frozen=True)
class Deploy(OfModel):
    _: KW_ONLY
    precision: Precision = option("int8", "", doc='"fp32", "fp16", "bf16", "int8", "mixed", "int4" or "fp8".')
    max_size: int | None = option(None, "", doc="bytes of the engine's files.")


@dataclass(frozen=True)
class Tune(OfModel):
    _: KW_ONLY
    time_budget: float | None = option(None, "", doc="seconds; nothing new is begun after half of them.")


@dataclass(frozen=True)
class Run(Options):
    recipe: "Recipe | str | Path" = field(metadata=required(RECIPE))
    folder: str | Path | None = option(
        None, OUTPUT, help="The bundle's folder. Default: out/<recipe's name>", required=False
    )
    _: KW_ONLY
    function: str | None = option(None, OWN_MODEL)
    overrides: Sequence[str] = option((), OVERRIDES)
    source: "Model | None" = option(None, "", doc="a model in memory, in a recipe that names none.")
    resume: bool = option(True, RESUME)
    skip_bad: bool = option(False, SKIP_BAD)
    executor: str | None = option(None, EXECUTOR, help=f"Where stages are made, up to what is measured: {BY_EXECUTOR}")
    jobs: int = option(0, JOBS)
    progress: "bool | Reporter" = option(True, PROGRESS)


@dataclass(frozen=True)
class TuneRecipe(Options):
    recipe: "Recipe | str | Path" = field(metadata=required(RECIPE))
    folder: str | Path | None = option(
        None, OUTPUT, help="Folder for the result. Default: out/<recipe's name>-tuned", required=False
    )
    _: KW_ONLY
    targets: Sequence[str] = option(
        (), "Search for this target alone; may be repeated.", flag="--target", complete="targets"
    )
    budget: Mapping[str, float | None] | None = option(None, "", doc="bounds that override those of the recipe.")
    time_budget: float | None = option(
        None,
        "90s, 20m, 1h: begin nothing new after half of it; waiting for other measurements does not count.",
        doc="seconds; nothing new is begun after half of them.",
        kind="duration",
    )
    function: str | None = option(None, OWN_MODEL)
    overrides: Sequence[str] = option((), OVERRIDES)
    source: "Model | None" = option(None, "", doc="a model in memory, in a recipe that names none.")
    resume: bool = option(True, RESUME)
    skip_bad: bool = option(False, SKIP_BAD)
    executor: str | None = option(
        None, EXECUTOR, help=f"Where variants are made, up to what is measured: {BY_EXECUTOR}"
    )
    jobs: int = option(0, JOBS)
    progress: "bool | Reporter" = option(True, PROGRESS)


@dataclass(frozen=True)
class BudgetOptions(Options):
    """The budget of `vitdeploy tune`, as far as it is not the recipe's."""

    max_drop: float | None = option(None, "Points of accuracy that may be lost at most.", min=0)
    min_agreement: float | None = option(None, "Percent of the original's answers, at least.", min=0, max=100)
    max_latency: float | None = option(None, "Milliseconds, p50 of a single stream.", min=0, above=True)
    max_memory: int | None = option(None, "Bytes, peak of a process that loads it and answers.", min=1)


@dataclass(frozen=True)
class Sweep(Options):
    recipes: Sequence[str | Path] = field(
        metadata=required(doc="their files; that of a grid is all its recipes.", kind="path", place="many")
    )
    folder: str | Path | None = option(
        None,
        OUTPUT,
        help=" ",
        doc="where the bundles, sweep.json and sweep.html are written; None: a folder that goes when Python ends.",
        default="out/sweep",
    )
    _: KW_ONLY
    function: str | None = option(None, OWN_MODEL)
    overrides: Sequence[str] = option((), OVERRIDES, help="Override a field of every recipe.")
    jobs: int = option(1, "How many recipes are made at the same time. What is measured always runs alone.", min=1)
    executor: str | None = option(
        None,
        EXECUTOR,
        help="Where they are made: on this machine, or on a Ray cluster; --jobs limits how many at a time.",
        doc='where they are made: "processes" of this machine, a cluster of "ray" on it, or "ray:HOST:PORT". With Ray, '
        "`jobs` above 1 is a limit; else it has as many tasks at once as CPUs. Nodes with the resource "
        '"vitdeploy_device" also measure, each one recipe at a time and nothing else.',
    )
    resume: bool = option(
        True, RESUME, help="Keep the bundles of OUTPUT that an earlier sweep has finished, with their measurements."
    )
    minutes: float | None = option(None, "Begin no recipe that would end after so many.", min=0, above=True)
    watch: bool = option(False, "Write sweep.html from the beginning, as a page that reloads itself.")
    skip_bad: bool = option(False, SKIP_BAD)
    progress: "bool | Reporter" = option(True, PROGRESS)
