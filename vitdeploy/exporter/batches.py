"""Batch sizes at which a graph is valid, and tables that depend on the batch size."""

import contextlib
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import SymInt, Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import Node
from torch.utils import _pytree as pytree

from vitdeploy.errors import EngineError, ExportError, TensorError
from vitdeploy.exporter.parity import BATCHES, SEED, TOLERANCE, refuse_two_answers, worst_difference
from vitdeploy.runtime.inputs import random_inputs
from vitdeploy.runtime.preprocess import normalise
from vitdeploy.runtime.runner import Array, Runner
from vitdeploy.spec import PreprocessSpec

# --- Find the batch sizes at which the outputs of an image do not depend on the other images --------------------------
# A file may declare a dynamic batch and still contain sizes of the batch that it was traced with, or mix data of
# different images. Such a file is correct only at some batch sizes, usually at one.


# Tried in order if the file is not correct at all sizes.
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32)

Answers = Mapping[str, Array]


@dataclass(frozen=True)
class OneFunction:
    """`sizes`: the batch sizes at which the file is correct, () if it is at all that were tried; `why`: what happens at
    the first incorrect one."""

    sizes: tuple[int, ...]
    why: str = ""


def one_function(runner: Runner, preprocess: PreprocessSpec) -> OneFunction:
    """Compare a loaded runner's outputs for seeded random images run alone and together; its batch is dynamic.

    Raises:
        ExportError: it gives different outputs for the same image, or does not run at any size.
    """
    images, (image, *others) = _images(preprocess, max(SIZES)), runner.inputs
    fed = images if image.dtype == "uint8" else normalise(images, preprocess)
    asker = _Asker(runner, {image.name: fed, **random_inputs(others, max(SIZES), 0)})
    again = asker.together([0])
    if not isinstance(again, str) and not isinstance(first := asker.alone(0), str):
        refuse_two_answers(again, first)
    wrong = next(((size, what) for size in BATCHES if (what := asker.trouble(size))), None)
    if wrong is None:
        return OneFunction(())
    why = f"at batch {wrong[0]} it {wrong[1]}"
    sizes = tuple(size for size in SIZES if not asker.trouble(size))
    if not sizes:
        raise ExportError(
            "the ONNX file does not run at any batch size",
            found=why,
            expected=f"at least one of {', '.join(map(str, SIZES))}",
            fix="export the model again with a fixed batch of 1",
        )
    return OneFunction(sizes, why)


class _Asker:
    """Runs the images of `feeds`, selected by index; a result of type str says why the runner fails."""

    def __init__(self, runner: Runner, feeds: Answers) -> None:
        self._runner, self._feeds = runner, feeds
        self._alone: dict[int, Answers | str] = {}

    def together(self, numbers: Sequence[int]) -> Answers | str:
        try:
            return self._runner.infer({name: array[list(numbers)] for name, array in self._feeds.items()})
        except (EngineError, TensorError) as error:
            return error.found

    def alone(self, number: int) -> Answers | str:
        if number not in self._alone:
            self._alone[number] = self.together([number])
        return self._alone[number]

    def trouble(self, size: int) -> str:
        """Describe the problem at a batch size; "" if outputs agree. Checks the first and the last image."""
        numbers = list(range(size))
        found = self.together(numbers)
        if isinstance(found, str):
            return f"does not run ({found})"
        if any(len(array) != size for array in found.values()):
            return f"returns {', '.join(f'{name} {list(array.shape)}' for name, array in found.items())}"
        # If it does not run at 1: the same images in another order.
        turned = self.together(numbers[::-1]) if isinstance(self.alone(0), str) else None
        for row in sorted({0, size - 1}):
            other, at = (self.alone(row), 0) if turned is None else (turned, size - 1 - row)
            if isinstance(other, str):
                return f"does not run ({other})"
            theirs = {name: array[at : at + 1] for name, array in other.items()}
            mine = {name: array[row : row + 1] for name, array in found.items()}
            if any(mine[name].shape != theirs[name].shape for name in mine):
                return "makes the outputs of an image depend on the other images"
            apart = worst_difference(mine, theirs)
            if not apart <= TOLERANCE:
                return f"makes the outputs of an image depend on the other images (max|a-b| / max|b| = {apart:.1e})"
        return ""


def _images(preprocess: PreprocessSpec, count: int) -> np.ndarray:
    generator = np.random.default_rng(SEED)
    height, width = preprocess.crop
    return generator.integers(0, 256, (count, height, width, preprocess.channels), dtype=np.uint8)


# --- Fold values that a module computes from the batch size alone into constants --------------------------------------
# Examples: position tables of an all-valid mask, anchors, the reference points of a grid. The module's own checks of
# such tensors are evaluated once, here, and leave no operation in the graph.
#
# A runtime would compute them again for each image, although they do not depend on pixels; constant folding cannot
# remove them, because the batch is dynamic.


aten = torch.ops.aten
# A table has the same rows at both batch sizes. Neither is 1, which would broadcast.
TABLE_SIZES = (2, 3)
MAX_ELEMENTS = 1 << 24
# Operators that read only the shape and the type of their first argument.
_LIKE = {
    *(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default),
    *(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default),
}
# Operators that compute nothing: as an Expand they are as small as a table.
_COPIES = _LIKE | {
    *(aten.expand.default, aten.expand_as.default, aten.repeat.default, aten.view.default, aten.reshape.default),
    *(aten.flatten.using_ints, aten.unsqueeze.default, aten.squeeze.dim, aten.permute.default, aten.transpose.int),
    *(aten.slice.Tensor, aten.select.int, aten.zeros.default, aten.ones.default, aten.full.default),
    *(aten.clone.default, aten.contiguous.default, aten.detach.default, aten.alias.default, aten.dropout.default),
    *(aten.to.dtype, aten.to.dtype_layout, aten.lift_fresh_copy.default),
}
# A module's own checks. They passed when it was run before, at this image size; no runtime can execute them.
_CHECKS = {aten._assert_scalar.default, aten._assert_async.default, aten._assert_async.msg}


@contextlib.contextmanager
def constant_tables() -> Iterator[None]:
    """Context in which `torch.export.export` returns programs with tables as constants."""
    own = torch.export.export

    def export(*arguments: Any, **options: Any) -> ExportedProgram:
        program = own(*arguments, **options)
        fold_tables(program)
        return program

    torch.export.export = export
    try:
        yield
    finally:
        torch.export.export = own


def fold_tables(program: ExportedProgram) -> int:
    """Replace in place the tensors that depend on the batch size alone; returns how many became constants."""
    found = _Tables(program)
    tables = {node: table for node in program.graph.nodes if (table := found.table(node)) is not None}
    shown = {node: table for node, table in tables.items() if any(user not in tables for user in node.users)}
    writer = _Writer(program)
    for node, table in shown.items():
        writer.replace(node, table)
    for node in [each for each in program.graph.nodes if each.target in _CHECKS]:
        program.graph.erase_node(node)
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()
    return len(shown)


class _Tables:
    """The tensors of a program that do not depend on pixels, with their values at each of `TABLE_SIZES`."""

    def __init__(self, program: ExportedProgram) -> None:
        self._program = program
        self._symbols = {symbol for node in program.graph.nodes for symbol in _symbols(node.meta.get("val"))}
        self._given = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
        self._known: set[Node] = set()
        self._computed: set[Node] = set()
        changed = _changed(program.graph.nodes)
        for node in program.graph.nodes:
            if node not in changed and self._is_known(node):
                self._known.add(node)
                if self._is_computed(node):
                    self._computed.add(node)
        self._values = [self._evaluated(size) for size in TABLE_SIZES] if len(self._symbols) == 1 else []

    def _is_known(self, node: Node) -> bool:
        if node.op == "placeholder":
            return bool(self._given[node.name].kind != InputKind.USER_INPUT)
        if node.op != "call_function":
            return False
        if _is_size(node.meta.get("val")) or node.target in _LIKE:
            return True
        tags = () if node.target is operator.getitem else getattr(node.target, "tags", None)
        if tags is None or torch.Tag.nondeterministic_seeded in tags:
            return False
        return self._known.issuperset(node.all_input_nodes)

    def _is_computed(self, node: Node) -> bool:
        """Whether more than copies lead from the batch size to this node."""
        if node.op != "call_function" or _is_size(node.meta.get("val")) or node.target in _LIKE:
            return False
        if not self._computed.isdisjoint(node.all_input_nodes):
            return True
        return node.target not in _COPIES and bool(_symbols([each.meta.get("val") for each in node.all_input_nodes]))

    def _evaluated(self, batch: int) -> dict[Node, Any]:
        """Evaluate the computed nodes and their inputs at this batch size."""
        expected: set[Node] = set()
        for node in reversed(self._program.graph.nodes):
            if node in self._computed or (node in self._known and not expected.isdisjoint(node.users)):
                expected.add(node)
        values: dict[Node, Any] = {}
        for node in self._program.graph.nodes:
            if node in expected:
                values[node] = self._value(node, values, batch)
        return values

    def _value(self, node: Node, values: Mapping[Node, Any], batch: int) -> Any:
        if node.op == "placeholder":
            spec, program = self._given[node.name], self._program
            kept = program.constants if spec.target in program.constants else program.state_dict
            return kept[spec.target].detach()
        if _is_size(node.meta.get("val")):
            return _number(node.meta["val"], batch)
        leaves: list[Any] = list(node.args)
        if node.target in _LIKE:
            like = leaves[0].meta["val"]
            leaves[0] = torch.zeros([_number(size, batch) for size in like.shape], dtype=like.dtype)
        arguments, options = pytree.tree_map(
            lambda each: values[each] if isinstance(each, Node) else each, (leaves, dict(node.kwargs))
        )
        options.pop("device", None)
        call: Any = node.target
        return call(*arguments, **options)

    def table(self, node: Node) -> Tensor | None:
        """Return the node's value with a batch axis of size 1; None if it is not a table."""
        val = node.meta.get("val")
        if not self._values or node not in self._computed or not isinstance(val, Tensor) or not node.users:
            return None
        sizes: list[Any] = list(val.shape)
        free = [isinstance(size, SymInt) for size in sizes]
        if any(axis and str(size) not in self._symbols for axis, size in zip(free, sizes, strict=True)):
            return None
        found = [values[node] for values in self._values]
        rows = [each[tuple(slice(0, 1) if axis else slice(None) for axis in free)] for each in found]
        if rows[0].numel() > MAX_ELEMENTS or not torch.equal(*rows):
            return None
        same = all(torch.equal(row.expand_as(each), each) for row, each in zip(rows, found, strict=True))
        return rows[0].clone() if same else None


def _changed(nodes: Iterable[Node]) -> set[Node]:
    """Return the nodes that are written to in place, and all that may share their memory."""
    groups: dict[Node, set[Node]] = {}
    written: set[Node] = set()
    for node in nodes:
        groups[node] = {node}
        schema = getattr(node.target, "_schema", None)
        shares = node.target in _COPIES or node.target is operator.getitem
        if schema is not None and (shares or any(each.alias_info is not None for each in schema.returns)):
            for other in node.all_input_nodes:
                groups[node] |= groups[other]
            for member in groups[node]:
                groups[member] = groups[node]
        if schema is not None and schema.is_mutable:
            written.add(node)
    return {node for group in groups.values() if group & written for node in group}


class _Writer:
    """Writes constants into a program."""

    def __init__(self, program: ExportedProgram) -> None:
        self._program = program
        self._size: Node | None = None
        self._count = 0

    def replace(self, node: Node, table: Tensor) -> None:
        """Make users of `node` read the constant `table`, expanded to its shape."""
        program, graph, val = self._program, self._program.graph, node.meta["val"]
        self._count += 1
        name = f"table_{self._count}"
        with graph.inserting_before(next(iter(graph.nodes))):
            placeholder = graph.placeholder(f"c_{name}")
        placeholder.meta["val"] = val.fake_mode.from_tensor(table, static_shapes=True)
        program.constants[name] = table
        spec = InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(placeholder.name), name)
        program.graph_signature.input_specs.insert(0, spec)
        with graph.inserting_before(node):
            sizes = [self._batch() if isinstance(size, SymInt) else size for size in val.shape]
            narrow = graph.call_function(aten.expand.default, (placeholder, sizes))
            # A copy, because PyTorch's views need contiguous memory; ONNX has no strides, and no node for it.
            wide = graph.call_function(aten.clone.default, (narrow,), {"memory_format": torch.contiguous_format})
        narrow.meta, wide.meta = dict(node.meta), dict(node.meta)
        node.replace_all_uses_with(wide)

    def _batch(self) -> Node:
        """Return the node that reads the batch size from the image."""
        if self._size is None:
            graph, names = self._program.graph, self._program.graph_signature.user_inputs
            image, *_ = (node for node in graph.nodes if node.op == "placeholder" and node.name in names)
            (axis,) = (axis for axis, size in enumerate(image.meta["val"].shape) if isinstance(size, SymInt))
            with graph.inserting_after([node for node in graph.nodes if node.op == "placeholder"][-1]):
                self._size = graph.call_function(aten.sym_size.int, (image, axis))
            self._size.meta = {"val": image.meta["val"].shape[axis]}
        return self._size


def _symbols(values: Any) -> set[str]:
    """Return the names of all symbolic sizes among tensor shapes and sizes."""
    found: set[str] = set()
    for value in pytree.tree_leaves(values):
        for size in value.shape if isinstance(value, Tensor) else [value]:
            if isinstance(size, SymInt):
                found |= {str(symbol) for symbol in size.node.expr.free_symbols}
    return found


def _is_size(value: Any) -> bool:
    return isinstance(value, (SymInt, int))


def _number(size: Any, batch: int) -> int:
    """Return a size at a concrete batch size."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, batch)))
