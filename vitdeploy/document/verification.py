"""The document of `verify --json`."""

from __future__ import annotations

from dataclasses import dataclass

from vitdeploy.document.mapping import Copies, MappingFacts
from vitdeploy.document.verified import Verified
from vitdeploy.spec import encode
from vitdeploy.verification.gate import Gate


@dataclass(frozen=True)
class Verification:
    """One artifact against another on the same samples. `skipped`: files that could not be read. `warnings`: what makes
    all numbers doubtful. `copies`: images of the same bytes, None where there are none."""

    artifact: str
    against: str
    verified: Verified
    mapping: MappingFacts | None
    skipped: tuple[str, ...]
    remarks: tuple[str, ...]
    warnings: tuple[str, ...]
    gate: Gate
    copies: Copies | None = None

    def document(self) -> dict[str, object]:
        """JSON values, with those of the comparison beside the others."""
        found = encode(self)
        return {"artifact": found.pop("artifact"), "against": found.pop("against"), **found.pop("verified"), **found}
