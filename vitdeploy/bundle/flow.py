"""Do the graphs of a flow fit together? All that does not is found at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from vitdeploy.spec import EngineSpec, FlowPart, FlowSpec, TensorSpec


@dataclass(frozen=True)
class PartTensors:
    """What one graph takes and gives."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def tensors_of(parts: Sequence[EngineSpec]) -> dict[str, PartTensors]:
    """Inputs and outputs of an engine's parts by name."""
    return {part.part: PartTensors(part.inputs, part.outputs) for part in parts}


def link(flow: FlowSpec, source: str) -> tuple[str, str] | None:
    """(part, output) that a source names; None for an input of the whole."""
    part, dot, output = source.partition(".")
    return (part, output) if dot and part in {each.name for each in flow.parts} else None


def mismatches(flow: FlowSpec, graphs: Mapping[str, PartTensors]) -> list[str]:
    """Everything by which these graphs do not fit the flow, a line each: names, types, numbers of axes, fixed sizes.

    The leading axes are not compared: a graph takes as many rows in one run as it was made for.
    """
    if not flow.parts:
        return ["the flow has no part"]
    found = [f"{part.name}: no such graph" for part in flow.parts if part.name not in graphs]
    names = [part.name for part in flow.parts]
    found += [f"{name}: a graph that the flow does not run" for name in graphs if name not in names]
    found += [f"{name}: runs twice" for name in sorted({name for name in names if names.count(name) > 1})]
    found += [f"{part.name}: repeats, but is not the last part" for part in flow.parts[:-1] if part.repeats]
    if found:
        return found
    given: dict[str, tuple[str, TensorSpec]] = {}
    before: list[FlowPart] = []
    for part in flow.parts:
        found += _of_part(flow, part, before, graphs, given)
        before.append(part)
    found += _repeated(flow, graphs)
    for name, source in flow.outputs.items():
        linked = link(flow, source)
        if linked is None or _named(graphs[linked[0]].outputs, linked[1]) is None:
            found.append(f"output {name}: there is no {source}")
    return found


def _repeated(flow: FlowSpec, graphs: Mapping[str, PartTensors]) -> Iterator[str]:
    """The misfits of a last part that repeats: it needs logits to choose tokens by, and caches that can begin empty."""
    last = flow.parts[-1]
    if not last.repeats:
        return
    if flow.outputs.get("logits", "").partition(".")[0] != last.name:
        yield f"{last.name}: repeats, and gives no logits"
    for tensor in graphs[last.name].inputs:
        sizes = tensor.shape[1:2] + tensor.shape[3:]
        if tensor.name in last.carries and (len(tensor.shape) != 4 or not all(isinstance(s, int) for s in sizes)):
            yield f"{last.name}.{tensor.name}: takes {_shown(tensor)}, wanted [batch, heads, length, width]"


def _of_part(
    flow: FlowSpec,
    part: FlowPart,
    before: Sequence[FlowPart],
    graphs: Mapping[str, PartTensors],
    given: dict[str, tuple[str, TensorSpec]],
) -> Iterator[str]:
    """The misfits of one part. `given`: the inputs of the whole so far, and where each was seen first."""
    graph = graphs[part.name]
    fed = [*part.feeds, *part.carries, *([part.token] if part.token is not None else [])]
    own = [tensor.name for tensor in graph.inputs]
    yield from (f"{part.name}.{name}: nothing feeds this input" for name in own if name not in fed)
    yield from (f"{part.name}.{name}: the graph has no such input" for name in fed if name not in own)
    yield from (f"{part.name}.{name}: fed twice" for name in sorted({name for name in fed if fed.count(name) > 1}))
    earlier = {each.name: each for each in before}
    for name, source in part.feeds.items():
        wanted, linked = _named(graph.inputs, name), link(flow, source)
        if wanted is None:
            continue
        if linked is None:
            first, seen = given.setdefault(source, (f"{part.name}.{name}", wanted))
            yield from _unlike(f"{part.name}.{name}", wanted, f"{first} takes {source},", seen)
        elif linked[0] not in earlier:
            yield f"{part.name}.{name}: {source} is not made before it is needed"
        elif earlier[linked[0]].batch != part.batch:
            yield f"{part.name}.{name}: {source} has another leading axis, {earlier[linked[0]].batch} for {part.batch}"
        else:
            yield from _linked(f"{part.name}.{name}", wanted, source, _named(graphs[linked[0]].outputs, linked[1]))
    for name, output in part.carries.items():
        wanted, tensor = _named(graph.inputs, name), _named(graph.outputs, output)
        if wanted is not None:
            source = f"{part.name}.{output}"
            yield from _linked(f"{part.name}.{name}", wanted, source, tensor)


def _linked(where: str, wanted: TensorSpec, source: str, tensor: TensorSpec | None) -> Iterator[str]:
    if tensor is None:
        yield f"{where}: there is no {source}"
    else:
        yield from _unlike(where, wanted, f"{source} is", tensor)


def _unlike(where: str, wanted: TensorSpec, said: str, tensor: TensorSpec) -> Iterator[str]:
    """A line if the tensor cannot be what is wanted: another type, number of axes, or fixed size behind the first."""
    sizes = zip(wanted.shape[1:], tensor.shape[1:], strict=False)
    other = any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in sizes)
    if tensor.dtype != wanted.dtype or len(tensor.shape) != len(wanted.shape) or other:
        yield f"{where}: takes {_shown(wanted)}, {said} {_shown(tensor)}"


def _shown(tensor: TensorSpec) -> str:
    return str(tensor).partition(": ")[2]


def _named(tensors: Sequence[TensorSpec], name: str) -> TensorSpec | None:
    return next((tensor for tensor in tensors if tensor.name == name), None)
