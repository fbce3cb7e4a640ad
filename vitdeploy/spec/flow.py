"""How the graphs of a model run together."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class FlowPart:
    """One graph of a flow, and where its inputs come from.

    `feeds`: by input of the graph, "part.output" of an earlier part, or the name of an input of the whole. `carries`:
    by input, the graph's own output of the step before, of a part that runs step by step; nothing is in it at the first
    step. `token`: the input of such a part that takes the tokens chosen last.
    `batch`: what the leading axis of its tensors is called in the whole; parts of one name run on equally many.
    """

    name: str
    feeds: dict[str, str]
    carries: dict[str, str] = field(default_factory=dict)
    token: str | None = None
    batch: str = "batch"

    @property
    def repeats(self) -> bool:
        """Whether it runs step by step, as `SequenceSpec` says."""
        return self.token is not None


@dataclass(frozen=True)
class FlowSpec:
    """How the graphs of a model run together: `parts` in their order, and `outputs` of the whole by name, each a
    "part.output". Only the last part may repeat."""

    parts: tuple[FlowPart, ...]
    outputs: dict[str, str]
