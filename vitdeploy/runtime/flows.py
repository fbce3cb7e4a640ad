"""The flows that vitdeploy exports itself, by the names of their graphs; the row of a task names its own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vitdeploy.bundle.layout import PartTensors, link
from vitdeploy.errors import TargetError
from vitdeploy.spec import FlowPart, FlowSpec, TensorSpec

PAST, PRESENT = "past_", "present_"
ENCODER, DECODER_STEP = "encoder", "decoder_step"
TOKEN = "token"
IMAGE_TOWER, TEXT_TOWER = "image_tower", "text_tower"
IMAGE_FEATURES, TEXT_FEATURES = "image_features", "text_features"
IMAGE_ENCODER, PROMPT_DECODER = "image_encoder", "prompt_decoder"

Graphs = Mapping[str, PartTensors]


def encoder_decoder(graphs: Graphs) -> FlowSpec:
    """An encoder runs once, a decoder step once a token. Outputs of the encoder feed inputs of the same name, and what
    the step gives as "present_..." is its "past_..." at the next step."""
    inputs = [tensor.name for tensor in graphs[DECODER_STEP].inputs]
    caches = {name: PRESENT + name.removeprefix(PAST) for name in inputs if name.startswith(PAST)}
    encoder = FlowPart(ENCODER, {tensor.name: tensor.name for tensor in graphs[ENCODER].inputs})
    passed = {name: f"{ENCODER}.{name}" for name in inputs if name not in caches and name != TOKEN}
    step = FlowPart(DECODER_STEP, passed, caches, TOKEN)
    return FlowSpec((encoder, step), {"logits": f"{DECODER_STEP}.logits"})


def towers(graphs: Graphs) -> FlowSpec:
    """A tower for images and one for texts, which need nothing of each other; "text_features" are not as many as
    "image_features". What else the image tower gives keeps its name."""
    image, text = (graphs[name] for name in (IMAGE_TOWER, TEXT_TOWER))
    parts = (
        FlowPart(IMAGE_TOWER, {tensor.name: tensor.name for tensor in image.inputs}),
        FlowPart(TEXT_TOWER, {tensor.name: tensor.name for tensor in text.inputs}, batch="texts"),
    )
    renamed = {"features": IMAGE_FEATURES}
    outputs = {renamed.get(each.name, each.name): f"{IMAGE_TOWER}.{each.name}" for each in image.outputs}
    return FlowSpec(parts, {**outputs, TEXT_FEATURES: f"{TEXT_TOWER}.features"})


def prompted(graphs: Graphs) -> FlowSpec:
    """An image encoder, and a decoder of prompts that takes whatever the encoder gives, by name, and one prompt for
    each image."""
    encoder, decoder = (graphs[name] for name in (IMAGE_ENCODER, PROMPT_DECODER))
    embedded = [tensor.name for tensor in encoder.outputs]
    feeds = {
        tensor.name: f"{IMAGE_ENCODER}.{tensor.name}" if tensor.name in embedded else tensor.name
        for tensor in decoder.inputs
    }
    parts = (
        FlowPart(IMAGE_ENCODER, {tensor.name: tensor.name for tensor in encoder.inputs}),
        FlowPart(PROMPT_DECODER, feeds),
    )
    return FlowSpec(parts, {tensor.name: f"{PROMPT_DECODER}.{tensor.name}" for tensor in decoder.outputs})


@dataclass(frozen=True)
class FlowRow:
    """The names of a model's graphs, in the order in which they run, and the flow of graphs with these names."""

    parts: tuple[str, ...]
    make: Callable[[Graphs], FlowSpec]


ENCODER_DECODER = FlowRow((ENCODER, DECODER_STEP), encoder_decoder)
TOWERS = FlowRow((IMAGE_TOWER, TEXT_TOWER), towers)
PROMPTED_GRAPHS = FlowRow((IMAGE_ENCODER, PROMPT_DECODER), prompted)
FLOWS = (ENCODER_DECODER, TOWERS, PROMPTED_GRAPHS)
PARTS = tuple(row.parts for row in FLOWS)


def flow_of_graphs(graphs: Graphs) -> FlowSpec:
    """The flow of graphs by their names; raises TargetError if none has these."""
    known = next((row.make for row in FLOWS if set(row.parts) == set(graphs)), None)
    if known is None:
        raise TargetError(
            "nothing says how these graphs run together",
            found=", ".join(graphs),
            expected="a flow in the manifest; or " + " or ".join(" and ".join(names) for names in PARTS),
        )
    return known(graphs)


def inputs_of(flow: FlowSpec, graphs: Graphs) -> tuple[TensorSpec, ...]:
    """The inputs of the whole, in the order in which the parts take them."""
    found: dict[str, TensorSpec] = {}
    for part in flow.parts:
        own = {tensor.name: tensor for tensor in graphs[part.name].inputs}
        for name, source in part.feeds.items():
            if link(flow, source) is None:
                found.setdefault(source, _called(own[name], source, part.batch))
    return tuple(found.values())


def outputs_of(flow: FlowSpec, graphs: Graphs) -> tuple[TensorSpec, ...]:
    """The outputs of the whole."""
    found = []
    batches = {part.name: part.batch for part in flow.parts}
    for name, source in flow.outputs.items():
        part, _, output = source.partition(".")
        tensor = next(tensor for tensor in graphs[part].outputs if tensor.name == output)
        found.append(_called(tensor, name, batches[part]))
    return tuple(found)


def _called(tensor: TensorSpec, name: str, batch: str) -> TensorSpec:
    """The tensor under its name in the whole, where any number of rows may be fed."""
    return TensorSpec(name, tensor.dtype, (batch, *tensor.shape[1:]))
