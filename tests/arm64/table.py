"""The table of docs/devices.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.arm64.engines import Proof

HEAD = ("model", "engine", "CPU", "ran", "same answers", "difference", "dot products")


def table(proofs: Sequence[Proof], executed: Mapping[tuple[str, str], str]) -> str:
    """Markdown; `executed` are the instructions, by board and engine."""
    rows = [HEAD, tuple("---" for _ in HEAD)]
    order = list(dict.fromkeys(proof.engine.name for proof in proofs))
    for proof in sorted(proofs, key=lambda each: order.index(each.engine.name)):  # the boards of an engine together
        engine = proof.engine
        first = (engine.model, engine.name, proof.cpu)
        if proof.refused:
            rows.append((*first, f"refused: {proof.refused}", "", "", ""))
            continue
        ran = ", ".join(f"{count} {kind}" for kind, count in sorted(proof.kernels.items(), key=lambda each: -each[1]))
        count = len(next(iter(engine.golden.inputs.values())))
        instructions = executed.get((proof.cpu, engine.name), "") if engine.placed else ""
        rows.append((*first, ran, f"{proof.same} of {count}", f"{proof.difference:.0e}", instructions))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
