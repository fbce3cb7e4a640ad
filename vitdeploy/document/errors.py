"""An error in a document."""

from __future__ import annotations

from dataclasses import dataclass

from vitdeploy.errors import VitdeployError
from vitdeploy.spec import decode


@dataclass(frozen=True)
class ErrorFacts:
    """The stable code, the exit code of the command, and the parts of the message."""

    code: str
    message: str
    exit_code: int
    found: str
    wanted: str
    fix: str

    @classmethod
    def of(cls, error: VitdeployError) -> ErrorFacts:
        return decode(cls, error.to_dict())
