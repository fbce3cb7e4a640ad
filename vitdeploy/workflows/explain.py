"""`explain`: attention maps of a bundle's model for one image."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from vitdeploy.attention import Floats, InstrumentedOutputs, read_by, run_instrumented, to_grid
from vitdeploy.bundle.read import read_bundle, require_graphs, verify_files
from vitdeploy.document.commands import Explanation
from vitdeploy.errors import GraphError, InputError, OutputError
from vitdeploy.graph.analysis.attention import AttentionViews, object_views, token_views
from vitdeploy.graph.canonical.normalise import normalise
from vitdeploy.graph.io.admit import admit
from vitdeploy.graph.io.files import get_metadata
from vitdeploy.publish import storage_errors, sync_folder, temporary_folder
from vitdeploy.report.attention import MapPanel, attention_picture, picture_size
from vitdeploy.runtime import preprocess, runner, values
from vitdeploy.runtime.inputs import further_inputs, require_image_alone
from vitdeploy.runtime.tasks import classification, detection, registry
from vitdeploy.runtime.tasks.detection import PostprocessSpec
from vitdeploy.spec import Manifest, PreprocessSpec

# Number of detected objects shown.
OBJECTS = 3


def explain(bundle: Path, image: Path, output: Path) -> Explanation:
    """Draw the attention maps of a bundle's float graph for one image, on ONNX Runtime.

    For a ViT, or the image graph of a model of several such as CLIP's image encoder: every head of the last attention,
    their mean, and the rollout over all blocks. For a DETR: the decoder's last cross-attention, for the best detected
    objects.

    Returns: the facts of the picture.

    Raises:
        GraphError: the bundle has no float graph, or its attention is not over the patches of the whole image.
        InputError: a bundle for sequences, or an image in which a detector detects nothing.
        OutputError: `output` is not a valid path for a PNG. Errors of bundle, image and runtime propagate.
    """
    _check_output(output, image)
    manifest = read_bundle(bundle)
    require_graphs(bundle, manifest, "an attention map")
    if manifest.preprocess is None:
        raise InputError(
            f"{bundle} takes no images: explain draws attention maps over an image",
            found=f"a bundle for the task {manifest.task}",
            expected="a bundle of a model that takes images",
        )
    graph = manifest.graphs[_image_graph(manifest)]
    require_image_alone(manifest.name, further_inputs(manifest.task, graph.inputs), "an attention map")
    pixels = preprocess.load_image(image, manifest.preprocess)[0]
    model = _float_graph(bundle, manifest)
    head = manifest.postprocess
    objects = isinstance(head, PostprocessSpec)
    views = object_views(model, str(bundle)) if objects else token_views(model, str(bundle))
    [instrumented] = run_instrumented(model, views, [pixels], manifest.preprocess)
    labels = values.read_labels(bundle, manifest)
    if isinstance(head, PostprocessSpec):
        panels = _object_panels(views, instrumented, head, pixels, labels, image)
    else:
        panels = _token_panels(views, instrumented, labels)
    rows, columns = views.grid
    read = f"{_image_graph(manifest)}, {views.reader}" if registry.flow_of(manifest.task) else views.reader
    subheading = f"{image.name}: {read}; {rows} × {columns} patches, {len(instrumented.heads)} heads"
    _write(output, attention_picture(pixels, panels, f"{manifest.name}: attention maps", subheading))
    return Explanation(
        path=str(output),
        image=str(image),
        task=manifest.task,
        size=picture_size(pixels, len(panels)),
        grid=views.grid,
        heads=len(instrumented.heads),
        blocks=len(views.blocks),
        prefix_tokens=views.prefix,
        read=read,
        maps=tuple(panel.title for panel in panels if panel.map is not None),
    )


def _check_output(output: Path, image: Path) -> None:
    wrong = None
    if output.suffix.lower() != ".png":
        wrong = f"the suffix {output.suffix}" if output.suffix else "a name without a suffix"
    elif output.is_dir():
        wrong = "a folder"
    elif output.exists() and image.exists() and output.samefile(image):
        wrong = "the image itself"
    if wrong:
        what = f"{output} is an invalid output path for the picture"
        raise OutputError(what, found=wrong, expected="a .png file", fix="change -o")


def _image_graph(manifest: Manifest) -> str:
    """The name of the graph that takes the image: the first one."""
    flow = registry.flow_of(manifest.task)
    return "model" if flow is None else flow.parts[0]


def _float_graph(bundle: Path, manifest: Manifest) -> ir.Model:
    """The graph of a bundle that takes the image, in canonical form, with the shapes of its tensors."""
    file = manifest.graphs[_image_graph(manifest)].file
    listed = {entry.path for entry in manifest.files}
    verify_files(bundle, manifest, [name for name in (file, f"{file}.data") if name in listed])
    model = admit(bundle / file)
    metadata = get_metadata(model, str(bundle / file))
    if metadata.precision not in (None, "fp32"):
        raise GraphError(
            f"{bundle} contains no float graph",
            found=f"{file} placed in {metadata.precision} for {metadata.target}",
            expected="a bundle made by `vitdeploy run`, or compiled from a float graph",
            fix="vitdeploy compile FLOAT_DIR --target onnxruntime-cpu -o DIR",
        )
    normalise(model)
    return model


def _token_panels(
    views: AttentionViews, instrumented: InstrumentedOutputs, labels: Sequence[str] | None
) -> list[MapPanel]:
    heads = instrumented.heads
    maps = {
        f"Rollout over {len(views.blocks)} attentions": instrumented.flow(views),
        f"Mean of the {len(heads)} heads": heads.mean(axis=0),
        **{f"Head {number}": head for number, head in enumerate(heads, start=1)},
    }
    logits = instrumented.outputs.get("logits")
    note = _certain(classification.classify(logits, labels, 1).top[0]) if logits is not None else ""
    panels = [MapPanel("Model input", note)]
    return panels + [
        _panel(title, to_grid(read_by(weights, views.rows), views.grid)) for title, weights in maps.items()
    ]


def _object_panels(
    views: AttentionViews,
    instrumented: InstrumentedOutputs,
    head: PostprocessSpec,
    pixels: preprocess.Pixels,
    labels: Sequence[str] | None,
    image: Path,
) -> list[MapPanel]:
    maps = to_grid(instrumented.heads.mean(axis=0), views.grid)
    detections = _best_objects(instrumented.outputs, views.last.queries, head, pixels, labels)
    if not detections:
        raise InputError(
            f"the model detects nothing in {image}",
            found=f"no object with a score above {head.threshold:g}",
            expected="an image with objects of the model's classes",
        )
    panels = [MapPanel("Model input", f"the {len(detections)} best detected objects")]
    return panels + [replace(_panel(_certain(each), maps[query]), box=each.box) for query, each in detections.items()]


def _best_objects(
    outputs: Mapping[str, runner.Array],
    queries: int,
    head: PostprocessSpec,
    pixels: preprocess.Pixels,
    labels: Sequence[str] | None,
) -> dict[int, detection.Detection]:
    """The best objects by their query. Boxes are in pixels of the model's input."""
    height, width, channels = pixels.shape
    seen = PreprocessSpec((height, width), (height, width), mean=(0.0,) * channels, std=(1.0,) * channels)
    detections: dict[int, detection.Detection] = {}
    for query in range(queries):
        own = {name: outputs[name][query : query + 1] for name in ("logits", "boxes")}
        for each in detection.detect(own, (width, height), seen, head, labels).objects[:1]:
            detections[query] = each
    return dict(sorted(detections.items(), key=lambda item: -item[1].score)[:OBJECTS])


def _certain(answer: classification.ClassScore | detection.Detection) -> str:
    return f"{answer.label}, {100 * answer.score:.1f} %"


def _panel(title: str, grid: Floats) -> MapPanel:
    share, most = 100 * grid.sum(), 100 * grid.max()
    note = f"at most {most:.1f} % on one patch"
    if share < 99.95:  # the rest goes to the class token and other prefix tokens
        note = f"{share:.0f} % on patches, at most {most:.1f} % on one"
    return MapPanel(title, note, grid)


def _write(output: Path, picture: bytes) -> None:
    """Write the file atomically."""
    with temporary_folder(output.parent) as work, storage_errors(output):
        (work / output.name).write_bytes(picture)
        sync_folder(work)
        (work / output.name).replace(output)
