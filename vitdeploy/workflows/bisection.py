"""`verify --bisect`: find where the error of an engine enters, and report it in numbers and words."""

import math
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import onnx_ir as ir

from vitdeploy.data.decoding import batches
from vitdeploy.errors import InputError
from vitdeploy.graph.io import admit, files
from vitdeploy.pipeline.early import float_graph, open_bundle
from vitdeploy.progress import Progress
from vitdeploy.runtime import choice, ort
from vitdeploy.runtime.inputs import further_inputs, require_image_alone
from vitdeploy.search import frame, graphs
from vitdeploy.search.bisect import STANDS_OUT, Bisection, Culprit, Fix, GraphPart, bisect, find_fix, fixed_bits
from vitdeploy.spec import EngineSpec
from vitdeploy.stages.step import QUANTIZED, find_graph
from vitdeploy.tasks.images import calibration_images
from vitdeploy.workflows.subjects import Finder

IMAGES = 32
# Number of parts shown if none stands out.
SHOWN_PARTS = 3
# More layers than this are counted instead of named.
MANY = 4
TEXT = "runs"


def bisect_artifact(
    artifact: str,
    against: str,
    data: Path,
    *,
    target: str | None,
    num_samples: int | None,
    seed: int,
    skip_bad: bool,
    progress: Progress,
) -> tuple[dict[str, object], list[str], str]:
    """Find where the answers of an engine start to differ from those of its float graph: the document, its printed
    lines, and the command that fixes it ("" without one).

    The images are those that `vitdeploy quantize --data` would calibrate on, 32 by default: evaluation images stay
    unseen. The float graph is that of `against` if this is a graph or a bundle, else the artifact's own.

    Raises:
        InputError: no engine, no float graph, the float graph of another model, or a model that takes no images. Errors
            of data, graphs and engines propagate.
    """
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
        bundle = Finder(Path(folder), target).bundle(artifact)
        if bundle is None:
            raise InputError(
                "--bisect needs an engine compiled from a graph",
                found=f"{artifact}, an original",
                expected="a bundle, or a graph that vitdeploy wrote",
                fix="make one: vitdeploy run, or vitdeploy compile",
            )
        manifest, _ = open_bundle(bundle)
        chosen = choice.select_engines(manifest, target or "auto")
        # Prefer a quantized engine: the recommended one may be in float.
        engine = next((spec for spec in chosen if spec.precision in QUANTIZED), chosen[0])
        if manifest.preprocess is None:
            raise InputError(
                f"{artifact} takes no images",
                found=f"the task {manifest.task}",
                expected="a model that takes images",
                fix="keep single graphs in float (vitdeploy quantize --float-part NAME), and compare with `verify`",
            )
        require_image_alone(manifest.name, further_inputs(manifest.task, engine.inputs), "--bisect")
        looked_at = _of_image(engine)
        file = float_graph(against) or float_graph(str(bundle))
        if file is None:
            raise InputError(
                "no float graph to compare with",
                found=f"{artifact} contains only its INT8 form, and {against} is not a graph",
                expected="the folder of `vitdeploy export` or `optimize` that it was quantized from",
                fix="pass that folder: --against FOLDER",
            )
        graph, placement = files.load_graph(file), admit.admit_graph(bundle / looked_at.graph)
        _check_same_model(graph, placement, str(file))
        images = files.get_metadata(graph, str(file)).images
        samples, skipped = calibration_images(
            data, num_samples or IMAGES, seed, images, skip_bad=skip_bad, progress=progress
        )
        [pixels] = batches(samples, images, len(samples))
        with ort.OnnxRuntimeRunner(file, name="float") as runner:
            reference_outputs = frame.ReferenceOutputs(runner, pixels, images, manifest.task, batch=looked_at.batch)
        splice = graphs.Splice(graph, placement, looked_at, reference_outputs)
        splice.ran = lambda: progress(f"{TEXT} of {engine.artifact} in parts", splice.runs, max(16, splice.runs + 1))
        bisection = bisect(splice)
        fix = find_fix(bisection, splice)
    shown = find_graph(Path(artifact)) if file.is_relative_to(folder) else file
    formatter = _BisectionFormatter(
        artifact, str(shown), str(data), engine, "KL {} nats" if manifest.task == "classification" else "{}"
    )
    document: dict[str, object] = {"graph": looked_at.part} if engine.parts else {}
    document |= {
        **{"artifact": artifact, "against": str(shown), "engine": engine.artifact, "n": len(pixels)},
        **{"skipped": list(skipped), "metric": formatter.metric, "runs": splice.runs},
        **{key: _plain(each) for key, each in asdict(bisection).items()},
        "fix": None if fix is None else _plain(asdict(fix)),
    }
    document |= {"located": bisection.located is not None, "sentence": formatter.sentence(bisection)}
    return document, formatter.lines(bisection, fix, len(pixels), splice.runs), formatter.command(fix)


def _of_image(engine: EngineSpec) -> EngineSpec:
    """The graph of an engine that takes only images: the engine itself, or the first of several graphs. The others take
    its outputs, or inputs of other kinds, such as texts."""
    return engine.parts[0] if engine.parts else engine


def _check_same_model(graph: ir.Model, placement: ir.Model, name: str) -> None:
    ours, theirs = (files.graph_spec(model, "") for model in (placement, graph))
    if (ours.inputs, ours.outputs) != (theirs.inputs, theirs.outputs):
        raise InputError(
            f"{name} is the float graph of another model",
            found="; ".join(map(str, (*theirs.inputs, *theirs.outputs))),
            expected="; ".join(map(str, (*ours.inputs, *ours.outputs))),
            fix="pass the graph that the artifact was made from: --against GRAPH",
        )


@dataclass(frozen=True)
class _BisectionFormatter:
    """Formats the findings as text. `form` is the format of a distance."""

    artifact: str
    graph: str
    data: str
    engine: EngineSpec
    form: str

    @property
    def metric(self) -> str:
        return "kl" if "KL" in self.form else "relative squared error"

    def distance(self, value: float) -> str:
        if math.isinf(value):
            return "answers that are not finite"
        return self.form.format(f"{value:.2e}") + ("" if "KL" in self.form else " of the power of the outputs")

    def lines(self, found: Bisection, fix: Fix | None, images: int, runs: int) -> list[str]:
        parts = [each.part for each in self.engine.parts]
        name = f"{self.engine.artifact}, graph {parts[0]}" if parts else self.engine.artifact
        head = f"{self.artifact} ({name}) against {self.graph} on {images} images, {runs} runs"
        lines = [head, f"distance    {self.distance(found.distance)}", self.sentence(found)]
        culprit = found.located
        if culprit is not None:
            part = found.parts[0]
            lines.append(
                f"share       {_percent(part, culprit)} of the distance: {100 * part.share:.0f} % enters between "
                f"{part.start} and {part.end}"
            )
        elif not found.same:
            lines += [
                f"  {100 * part.share:.0f} % between {part.start} and {part.end}" for part in found.parts[:SHOWN_PARTS]
            ]
        lines += [f"fix        {self.words(fix)}"] if fix is not None else []
        if parts:
            others = _join(parts[1:])
            lines.append(f"not examined: {others}; `vitdeploy quantize --float-part NAME` keeps a graph in float")
        return lines

    def sentence(self, found: Bisection) -> str:
        if found.same:
            return "no error found: the answers equal those of the float graph"
        culprit, part = found.culprit, found.parts[0]
        if found.located is None:
            text = f"the error is spread over the graph: no part has {100 * STANDS_OUT:.0f} % of it"
            return text if culprit is None else f"{text}; most at {_place(culprit, part)}, {_percent(part, culprit)}"
        assert culprit is not None
        text = f"error enters at {_place(culprit, part)}"
        return text if culprit.facts is None else f"{text}: {_facts(culprit.facts)}"

    def words(self, fix: Fix) -> str:
        if fix.kind == "compile":
            what = "compile the float graph in FP32"
        elif fix.ignore:
            what = f"keep {_join(fix.ignore)} in float"
        else:
            what = "quantize the float graph again with this version (folds, channel scaling, rounding)"
        change = f"{self.distance(fix.before)} -> {self.distance(fix.after)}"
        if fix.enough:
            return f"{what}: {change}"
        if fix.kind == "compile":
            return f"none: FP32 gives the same error ({change}), so the runtime causes it; try another target"
        return f"none is sufficient; best attempt: {what}: {change}"

    def command(self, fix: Fix | None) -> str:
        if fix is None or not fix.enough:
            return ""
        words = ["vitdeploy", fix.kind, self.graph, "--target", self.engine.target, "-o", "DIR"]
        if fix.kind == "compile":
            return shlex.join([*words, "--precision", "fp32"])
        graph = f"{self.engine.parts[0].part}/" if self.engine.parts else ""
        ignore = [word for layer in fix.ignore for word in ("--ignore", f"{graph}{layer}")]
        bits = ["--no-vnni"] if fixed_bits(self.engine) < 8 else []
        return shlex.join([*words, "--data", self.data, *bits, *ignore])


def _percent(part: GraphPart, culprit: Culprit) -> str:
    return f"{100 * part.share * culprit.share:.0f} %"


def _place(culprit: Culprit, part: GraphPart) -> str:
    if culprit.kind == "node":
        return culprit.tensors[0] if len(culprit.tensors) == 1 else f"a node between {part.start} and {part.end}"
    # Layers that share an input, such as query, key and value, cannot and need not be separated.
    count = len(culprit.layers)
    if count > MANY:
        return f"the {culprit.kind}s of {count} layers between {part.start} and {part.end}"
    return f"{_join(culprit.layers)} {culprit.kind if count == 1 else culprit.kind + 's'}"


def _join(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _facts(facts: graphs.OutlierFacts) -> str:
    lost = f"{100 * (1 - facts.finite):.2g} % of the values are not finite, " if facts.finite < 1 else ""
    outliers = ", ".join(f"channel {channel} reaches {reach:.3g}" for channel, reach in facts.outliers.items())
    return (
        f"{lost}max {facts.high:.3g}, 99.9th percentile {facts.percentile:.3g} (min {facts.low:.3g}, "
        f"median channel {facts.median_channel:.3g}{'; ' + outliers if outliers else ''})"
    )


def _plain(value: object) -> object:
    """JSON values: None for non-finite numbers, names of channels as text."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
