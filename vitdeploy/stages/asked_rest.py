"""The precision of an INT8 engine's float operators, as a recipe gives it or as a step of the plan finds it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vitdeploy.search.float_rest import FloatRestTable
from vitdeploy.spec import FloatRest, decode
from vitdeploy.stages.files import read_json
from vitdeploy.stages.step import Candidate, Folders

FLOAT_REST, FLOAT_REST_FILE = "float_rest", "float_rest.json"


@dataclass(frozen=True)
class AskedRest:
    """`given`, or what the step of the name `step` has found. Of a step that depends on it: what it adds to the
    `config` and to the `inputs`."""

    given: FloatRest = "fp32"
    step: str | None = None

    def of(self, folders: Folders) -> FloatRest:
        return read_float_rest(folders[self.step].path).best if self.step is not None else self.given

    @property
    def config(self) -> dict[str, Any]:
        return {"float_rest": self.given} if self.given != "fp32" else {}

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.step,) if self.step is not None else ()


def rest_of(candidate: Candidate, rest: FloatRest | Literal["measured"]) -> AskedRest:
    return AskedRest(step=candidate.step(FLOAT_REST)) if rest == "measured" else AskedRest(rest)


def read_float_rest(folder: Path) -> FloatRestTable:
    return decode(FloatRestTable, read_json(folder / FLOAT_REST_FILE))
