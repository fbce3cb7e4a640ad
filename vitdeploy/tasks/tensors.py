"""The task of last resort: outputs that vitdeploy knows no meaning of are compared as numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from vitdeploy.document.answers import Said
from vitdeploy.runtime.tensors import line_of
from vitdeploy.spec import TensorsSpec
from vitdeploy.tasks.adapter import Data, ImageKit
from vitdeploy.tasks.drawn import drawn
from vitdeploy.verification.changes import Changes
from vitdeploy.verification.collect import Answers
from vitdeploy.verification.comparison import Comparison
from vitdeploy.verification.tensors import compare_tensors, tensor_changes

# Numbers of one output that are kept of each image: the maps of a thousand images would not fit into memory.
KEPT = 1 << 16


class TensorsKit(ImageKit):
    kinds = ("none", "folders")

    def keep(self, outputs: Mapping[str, np.ndarray], size: tuple[int, int]) -> Mapping[str, np.ndarray]:
        """Every output; of a larger one KEPT of its numbers, the same of every image and artifact."""
        return {name: drawn(output, KEPT) for name, output in outputs.items()}

    @property
    def _exact(self) -> tuple[str, ...]:
        assert isinstance(self.setting.postprocess, TensorsSpec)
        return self.setting.postprocess.exact

    def compare(self, ours: Answers, reference: Answers, data: Data) -> Comparison:
        return compare_tensors(ours.columns, reference.columns, self._exact)

    def changes(self, ours: Answers, reference: Answers, data: Data) -> Changes:
        return tensor_changes(ours.columns, reference.columns, self._exact)

    def show(self, answers: Answers, index: int, labels: Sequence[str] | None) -> Said:
        """The first output, in the numbers that describe it."""
        name, column = next(iter(answers.columns.items()))
        return Said(f"{name} {line_of(column[index])}", None)
