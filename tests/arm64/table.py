"""The table of docs/devices.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tests.arm64.engines import Proof

HEAD = ("model", "engine", "CPU", "ran", "same answers", "difference")


def table(proofs: Sequence[Proof], executed: Mapping[tuple[str, str], str]) -> str:
    """Markdown, one row for all boards on which an engine did the same; `executed` are the instructions, by board and
    engine, and stand in brackets after the board."""
    rows: dict[tuple[str, ...], tuple[list[str], list[float]]] = {}
    order = list(dict.fromkeys(proof.engine.name for proof in proofs))
    for proof in sorted(proofs, key=lambda each: order.index(each.engine.name)):  # the boards of an engine together
        engine = proof.engine
        ran = ", ".join(f"{count} {kind}" for kind, count in sorted(proof.kernels.items(), key=lambda each: -each[1]))
        count = len(next(iter(engine.golden.inputs.values())))
        result = (f"refused: {proof.refused}", "") if proof.refused else (ran, f"{proof.same} of {count}")
        instructions = executed.get((proof.cpu, engine.name)) if engine.placed and not proof.refused else None
        boards, differences = rows.setdefault((engine.model, engine.name, *result), ([], []))
        boards.append(f"{proof.cpu} ({instructions})" if instructions else proof.cpu)
        differences += [] if proof.refused else [proof.difference]
    lines = [HEAD, tuple("---" for _ in HEAD)]
    for (model, name, *result), (boards, differences) in rows.items():
        largest = f"{np.max(differences):.0e}" if differences else ""
        lines.append((model, name, ", ".join(boards), *result, largest))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
