"""The flows of vitdeploy's own exports, identified by the names of their graphs."""

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
    """Return the flow of an encoder that runs once and a decoder step that runs once per token. Outputs of the encoder
    feed inputs of the same name; the step's output "present_..." is its input "past_..." at the next step."""
    inputs = [tensor.name for tensor in graphs[DECODER_STEP].inputs]
    caches = {name: PRESENT + name.removeprefix(PAST) for name in inputs if name.startswith(PAST)}
    encoder = FlowPart(ENCODER, {tensor.name: tensor.name for tensor in graphs[ENCODER].inputs})
    passed = {name: f"{ENCODER}.{name}" for name in inputs if name not in caches and name != TOKEN}
    step = FlowPart(DECODER_STEP, passed, caches, TOKEN)
    return FlowSpec((encoder, step), {"logits": f"{DECODER_STEP}.logits"})


def towers(graphs: Graphs) -> FlowSpec:
    """Return the flow of independent image and text encoders; "text_features" and "image_features" have separate row
    counts. Other outputs of the image encoder keep their names."""
    image, text = (graphs[name] for name in (IMAGE_TOWER, TEXT_TOWER))
    parts = (
        FlowPart(IMAGE_TOWER, {tensor.name: tensor.name for tensor in image.inputs}),
        FlowPart(TEXT_TOWER, {tensor.name: tensor.name for tensor in text.inputs}, batch="texts"),
    )
    renamed = {"features": IMAGE_FEATURES}
    outputs = {renamed.get(output.name, output.name): f"{IMAGE_TOWER}.{output.name}" for output in image.outputs}
    return FlowSpec(parts, {**outputs, TEXT_FEATURES: f"{TEXT_TOWER}.features"})


def prompted(graphs: Graphs) -> FlowSpec:
    """Return the flow of an image encoder and a prompt decoder, which takes the encoder's outputs by name and one
    prompt per image."""
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
    """The names of a model's graphs in running order, and the function that makes their flow."""

    parts: tuple[str, ...]
    make: Callable[[Graphs], FlowSpec]


ENCODER_DECODER = FlowRow((ENCODER, DECODER_STEP), encoder_decoder)
TOWERS = FlowRow((IMAGE_TOWER, TEXT_TOWER), towers)
PROMPTED_GRAPHS = FlowRow((IMAGE_ENCODER, PROMPT_DECODER), prompted)
FLOWS = (ENCODER_DECODER, TOWERS, PROMPTED_GRAPHS)
PARTS = tuple(row.parts for row in FLOWS)


def flow_of_graphs(graphs: Graphs) -> FlowSpec:
    """Return the flow for graphs with these names; raise TargetError for unknown names."""
    known = next((row.make for row in FLOWS if set(row.parts) == set(graphs)), None)
    if known is None:
        raise TargetError(
            "unknown combination of graphs, without a flow",
            found=", ".join(graphs),
            expected="a flow in the manifest; or " + " or ".join(" and ".join(names) for names in PARTS),
        )
    return known(graphs)


def inputs_of(flow: FlowSpec, graphs: Graphs) -> tuple[TensorSpec, ...]:
    """Return the inputs of the flow, in the order in which the parts take them."""
    specs: dict[str, TensorSpec] = {}
    for part in flow.parts:
        own = {tensor.name: tensor for tensor in graphs[part.name].inputs}
        for name, source in part.feeds.items():
            if link(flow, source) is None:
                specs.setdefault(source, _called(own[name], source, part.batch))
    return tuple(specs.values())


def outputs_of(flow: FlowSpec, graphs: Graphs) -> tuple[TensorSpec, ...]:
    """Return the outputs of the flow."""
    found = []
    batches = {part.name: part.batch for part in flow.parts}
    for name, source in flow.outputs.items():
        part, _, output = source.partition(".")
        tensor = next(tensor for tensor in graphs[part].outputs if tensor.name == output)
        found.append(_called(tensor, name, batches[part]))
    return tuple(found)


def _called(tensor: TensorSpec, name: str, batch: str) -> TensorSpec:
    """The tensor under its name in the flow, with a dynamic number of rows."""
    return TensorSpec(name, tensor.dtype, (batch, *tensor.shape[1:]))
