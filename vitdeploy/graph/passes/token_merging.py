"""Merge similar tokens between attention and MLP: fewer rows for all that follows. Approximate, unlike other passes.

Token merging (ToMe, arXiv 2210.09461): patches go alternately to two sets, A and B; each of A finds the nearest of B
(section 3.2), and the nearest pairs become one token each, the mean of all patches in it. A token that stands
for s patches counts s times in all later attention (equation 1):

    softmax(Q K^T / sqrt(d) + log s) V

Distance is Euclidean, in the residual stream: these are the numbers that the mean replaces. The paper compares keys;
docs/adr/0010 says why this does not. All shapes but the batch are static, operators are ONNX's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.errors import GraphError
from vitdeploy.graph.analysis.tokens import MergePoints, follow, merge_points
from vitdeploy.graph.edit import Editor
from vitdeploy.graph.values import dim

# In the place of minus half a squared distance; finite, for infinities make NaN.
MASKED_SCORE = np.array(np.finfo(np.float32).min)


def merge_tokens(model: ir.Model, schedule: Mapping[int, int]) -> tuple[int, ...]:
    """Merge tokens behind the attention of some blocks, in place.

    Args:
        model: as `normalise` leaves it; passes that look for all tokens' rows (`class_token_only`) come before.
        schedule: block (as in `merge_points`) -> how many tokens remain behind its attention, those before the patches
            (class token, registers) among them, which are never merged. Tokens keep their order.

    Returns: how many tokens there are, at first and behind each block of the schedule.

    Raises:
        GraphError: the tokens of this graph cannot be merged at all, or not by this schedule.
    """
    found = merge_points(model)
    _check(schedule, found)
    editor, merged, tokens = Editor(model), None, found.count
    logarithms: dict[ir.Node, ir.Value] = {}
    for block, remaining in sorted(schedule.items()):
        point = found.points[block]
        flow, readers = follow(model, point.after, found.prefix), list(point.after.uses())
        reads = {node for node, _ in readers}
        first = next(node for node in model.graph if node in reads)
        assert point.after.shape is not None
        batch = point.after.shape[0]
        writer = _Writer(editor, first, f"blocks.{block}.merge", batch, found.prefix, tokens, remaining)
        merged = writer.merge(point.after, merged.sizes if merged is not None else None)
        for node, index in readers:
            node.replace_input_with(index, merged.tokens)
        for value, axes in flow.axes.items():
            if value is not point.after:
                editor.resize(value, axes, remaining)
        logarithms.update((each.softmax, merged.logarithm) for each in flow.attentions)
        tokens = remaining
    for softmax, logarithm in logarithms.items():
        scores = softmax.inputs[0]
        assert scores is not None
        name = f"{str(softmax.name).removesuffix('/Softmax')}.sizes"
        softmax.replace_input_with(0, editor.node(softmax, "Add", [scores, logarithm], name, scores.shape)[0])
    return (found.count, *(schedule[block] for block in sorted(schedule)))


def _check(schedule: Mapping[int, int], found: MergePoints) -> None:
    tokens = found.count
    for block, remaining in sorted(schedule.items()):
        if block not in found.points:
            raise GraphError(
                f"no tokens can be merged in block {block}",
                found=f"{tokens} tokens, merged behind the attention of {', '.join(map(str, found.points))}",
                fix="choose one of these blocks",
            )
        least = tokens - (tokens - found.prefix) // 2
        if not least <= remaining < tokens:
            raise GraphError(
                f"{remaining} tokens cannot remain in block {block}",
                found=f"{tokens} tokens there, {found.prefix} of them before the patches",
                wanted=f"{least} to {tokens - 1}: at most half of the patches go at once",
            )
        tokens = remaining


@dataclass(frozen=True)
class _Merged:
    """`tokens` [batch, tokens, channels]; `sizes` [batch, tokens, 1], of how many patches each one is the mean; and
    `logarithm` of these [batch, 1, 1, tokens], which is added to the scores of attention."""

    tokens: ir.Value
    sizes: ir.Value
    logarithm: ir.Value


class _Writer:
    """Writes one merge, of `count` tokens to `remaining`, in front of a node. Names of nodes begin with `name`."""

    def __init__(
        self,
        editor: Editor,
        before: ir.Node,
        name: str,
        batch: int | ir.SymbolicDim,
        prefix: int,
        count: int,
        remaining: int,
    ) -> None:
        self.editor, self.before, self.name = editor, before, name
        self.batch, self.prefix, self.count, self.remaining = batch, prefix, count, remaining

    def merge(self, tokens: ir.Value, sizes: ir.Value | None) -> _Merged:
        """Merge `tokens` [batch, count, channels].

        Args:
            sizes: [batch, count, 1]; None: one patch each.
        """
        stay, go, joined = self._match(tokens)
        own, others = self._pick(tokens, stay), self._pick(tokens, go)
        if sizes is None:
            added = self._op("ReduceSum", [joined, self._ints([2], "last")], self._column(self.remaining))
            sizes = self._op("Add", [added, self._constant(np.array(1, np.float32), "one")], added.shape)
        else:
            own_sizes, other_sizes = self._pick(sizes, stay), self._pick(sizes, go)
            added = self._op("MatMul", [joined, other_sizes], own_sizes.shape)
            own = self._op("Mul", [own, own_sizes], own.shape)
            others = self._op("Mul", [others, other_sizes], others.shape)
            sizes = self._op("Add", [own_sizes, added], added.shape)
        total = self._op("Add", [own, self._op("MatMul", [joined, others], own.shape)], own.shape)
        mean = self._op("Div", [total, sizes], own.shape)
        row = self._op(
            "Reshape", [sizes, self._ints([-1, 1, 1, self.remaining], "row")], [self.batch, 1, 1, self.remaining]
        )
        return _Merged(mean, sizes, self._op("Log", [row], row.shape))

    def _match(self, tokens: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        """(stay, go, joined): the numbers of the tokens that stay [batch, remaining, 1] and that go [batch, going, 1];
        and 1 where one goes into one that stays, else 0 [batch, remaining, going]."""
        going, second = self.count - self.remaining, np.arange(self.prefix + 1, self.count, 2)
        near, partner = self._nearest(tokens, second)
        # Ascending: the nearest last; all that have no partner come before them.
        _, order = self._ranked(near, self.count, self.count, axis=1, largest=0)
        parts = self._constant(np.array([self.remaining, going], np.int64), "parts")
        columns = [self._column(self.remaining), self._column(going)]
        stay, go = self.editor.node(self.before, "Split", [order, parts], self.name, *columns, axis=1)
        stay, _ = self._ranked(stay, self.remaining, self.remaining, axis=1, largest=0)
        row = [self.batch, 1, going]
        into = self._op("Reshape", [self._pick(partner, go), self._ints([-1, 1, going], "row")], row)
        into = self._op("Gather", [self._constant(second, "second"), into], row)
        joined = self._op("Equal", [into, stay], [self.batch, self.remaining, going])
        joined.type = ir.TensorType(ir.DataType.BOOL)
        joined = self._op("Cast", [joined], joined.shape, to=ir.DataType.FLOAT)
        joined.type = ir.TensorType(ir.DataType.FLOAT)
        return stay, go, joined

    def _nearest(self, tokens: ir.Value, second: npt.NDArray[np.int64]) -> tuple[ir.Value, ir.Value]:
        """For each token of A, minus half its squared distance to the nearest of B, and the index of that one in B;
        both [batch, count, 1]. For all other tokens MASKED_SCORE, and any index.

            -|a - b|^2 / 2 = a . b - |b|^2 / 2 - |a|^2 / 2

        Args:
            second: the indices of the tokens of B.
        """
        batch, count, width, many = self.batch, self.count, dim(tokens, 2), len(second)
        bounds = [
            self._ints([bound], name)
            for bound, name in zip((self.prefix + 1, self.count, 1, 2), ("start", "end", "axis", "step"), strict=True)
        ]
        others = self._op("Slice", [tokens, *bounds], [batch, many, width])
        turned = self._op("Transpose", [others], [batch, width, many], perm=[0, 2, 1])
        products = self._op("MatMul", [tokens, turned], [batch, count, many])
        squares = self._op("ReduceSumSquare", [tokens, self._ints([2], "channels")], self._column(count))
        halves = self._op("Mul", [squares, self._constant(np.array(0.5, np.float32), "half")], self._column(count))
        of_others = self._op("Slice", [halves, *bounds], self._column(many))
        of_others = self._op("Transpose", [of_others], [batch, 1, many], perm=[0, 2, 1])
        nearness = self._op("Sub", [products, of_others], products.shape)
        best, partner = self._ranked(nearness, 1, count, axis=2)
        nearness = self._op("Sub", [best, halves], best.shape)
        patch = np.arange(count) - self.prefix
        first = self._constant(((patch >= 0) & (patch % 2 == 0))[:, None], "first")
        chosen = self._op("Where", [first, nearness, self._constant(MASKED_SCORE, "far")], best.shape)
        chosen.type = tokens.type
        return chosen, partner

    def _ranked(self, values: ir.Value, count: int, rows: int, **attributes: int) -> tuple[ir.Value, ir.Value]:
        """(the first `count` values, their numbers), both [batch, rows, 1]."""
        shape = self._column(rows)
        best, numbers = self.editor.node(
            self.before, "TopK", [values, self._ints([count], "k")], self.name, shape, shape, **attributes
        )
        numbers.type = ir.TensorType(ir.DataType.INT64)
        return best, numbers

    def _pick(self, values: ir.Value, rows: ir.Value) -> ir.Value:
        """Select the rows with the indices `rows`, [batch, any, 1], of each image."""
        return self._op("GatherND", [values, rows], [self.batch, dim(rows, 1), dim(values, 2)], batch_dims=1)

    def _column(self, count: int) -> Sequence[Any]:
        return [self.batch, count, 1]

    def _op(self, operator: str, inputs: Sequence[ir.Value], shape: Any, **attributes: Any) -> ir.Value:
        return self.editor.node(self.before, operator, inputs, self.name, shape, **attributes)[0]

    def _constant(self, array: npt.NDArray[Any], name: str) -> ir.Value:
        return self.editor.constant(array, f"{self.name}.{name}")

    def _ints(self, values: Sequence[int], name: str) -> ir.Value:
        return self._constant(np.array(values, np.int64), name)
