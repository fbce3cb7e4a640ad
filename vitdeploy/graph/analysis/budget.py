"""What a graph may ask for at most, and the refusal of one that asks for more.

A file of 200 bytes can hold a loop of 2^62 trips, or forty doublings of one tensor. Constant folding, a runtime's
optimizer and a comparison run would each try to compute that. The limits are above all vision models known to us:
that of a product is 4 times what SAM ViT-H at 1024 pixels takes (2^28 attention scores, 3 * 10^12 MACs in all).
"""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir

from vitdeploy.errors import GraphError, UnsafeGraphError
from vitdeploy.limits import setting

# A number by which all limits are multiplied: for a user who knows the file and has the memory.
VARIABLE = "VITDEPLOY_GRAPH_LIMITS"
SHOWN_CHARACTERS = 80


class Limit(NamedTuple):
    """`what` is counted, and how much of it is allowed."""

    most: int
    what: str


INPUTS = Limit(1 << 26, "elements in the inputs")
# Beyond what is stored: a constant that is transposed or cast is not made larger by that.
CONSTANTS = Limit(1 << 26, "elements that constants are expanded to")
# By copies: 150 maps of 900 x 900 pixels. A doubled tensor is as cheap to ask for as it is dear to have.
GROWN = Limit(1 << 27, "elements in a tensor")
PRODUCT = Limit(1 << 30, "elements in a product")
# A bound of time, as MACS: a ViT-L at a fixed batch of 256 is within both.
ELEMENTS = Limit(1 << 38, "elements in all tensors together")
MACS = Limit(10**14, "multiplications")
STEPS = Limit(1 << 18, "operations, each counted as often as its loop runs")


class Budget:
    """The sums of what a graph asks for; `name` is that of its file, for people.

    Its methods raise UnsafeGraphError as soon as a limit is passed.
    """

    def __init__(self, name: str) -> None:
        self._name, self._factor = name, factor()
        self._sums: dict[Limit, int] = {}
        self._extra: dict[Limit, int] = {}

    def allow(self, limit: Limit, more: int) -> None:
        """Raise a limit by what the file itself holds."""
        self._extra[limit] = self._extra.get(limit, 0) + more

    def check(self, limit: Limit, amount: int, where: str) -> None:
        most = int((limit.most + self._extra.get(limit, 0)) * self._factor)
        if amount > most:
            number = f"{amount:,}" if amount < 10**18 else f"over 10^{len(str(amount)) - 1}"
            raise UnsafeGraphError(
                f"{self._name} asks for more memory or work than a vision model takes",
                found=f"{number} {limit.what}, at {where}",
                wanted=f"at most {most:,}",
                fix=f"if you trust the file and have the memory: {VARIABLE}={2 * self._factor:.15g} doubles all limits",
            )

    def add(self, limit: Limit, amount: int, where: str) -> None:
        self._sums[limit] = self._sums.get(limit, 0) + amount
        self.check(limit, self._sums[limit], where)

    def mark(self) -> dict[Limit, int]:
        """The sums as they are, for `repeat`."""
        return dict(self._sums)

    def repeat(self, mark: dict[Limit, int], times: int, where: str) -> None:
        """Add what was added since a mark as often again as `times`."""
        for limit, amount in list(self._sums.items()):
            self.add(limit, times * (amount - mark.get(limit, 0)), where)

    def ahead(self, limit: Limit, more: int, where: str) -> None:
        """Check what is about to be added, without doing so."""
        self.check(limit, self._sums.get(limit, 0) + more, where)

    def overflow(self, where: str) -> GraphError:
        """The error of a quotient of constants that is beyond its type."""
        return GraphError(
            f"{self._name} divides the least integer by -1, which ends the process of a runtime",
            found=where,
            wanted="quotients within their type",
            fix="export the model again; check where the file is from",
        )

    def open_loop(self, where: str) -> GraphError:
        """The error of a loop that ends when its data says so."""
        return GraphError(
            f"{self._name} has a loop of which nothing says how often it runs",
            found=where,
            wanted="a number of trips that is constant, or follows from the sizes of tensors",
            fix="export the model without that loop: unrolled, or as operators on whole tensors",
        )


def factor() -> float:
    """What the limits are multiplied by: 1, unless the user's environment says otherwise; errors as `setting`."""
    return setting(VARIABLE) or 1.0


def label(node: ir.Node) -> str:
    """A node in an error."""
    name = str(node.name or node.outputs[0].name if node.outputs else "")
    return f"{node.op_type} {name[:SHOWN_CHARACTERS]}".strip()
