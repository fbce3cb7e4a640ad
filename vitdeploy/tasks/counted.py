"""Tasks whose comparison is computed from counts per image, so that any number of images can be processed in shards.

The joined counts of all shards give bit for bit the result for all images at once: `compare` of such a task uses the
same two steps.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from vitdeploy.data import annotations, decoding, folder
from vitdeploy.spec import encode
from vitdeploy.tasks.adapter import Data, DataChoice, ImageAdapter, check_labels, controlled
from vitdeploy.tasks.images import OfTask
from vitdeploy.verification.changes import Counts
from vitdeploy.verification.comparison import Comparison, doubt_value
from vitdeploy.verification.records import Answers, Records

Truth = Mapping[Path, annotations.Annotation]
# Prefix for the names of the control's record tables.
CONTROL = "control "


class CountedAdapter(ImageAdapter):
    """A task that can be counted in shards."""

    # False for tasks with an image and a text encoder, whose classes are texts of the data.
    in_shards = True
    # The kinds of labels without files to read before the images of a shard.
    listable = ("folders", "none")
    # Divides the shard size of a classifier, for tasks with large answers per image.
    finer = 1

    def listed(self, choice: DataChoice, *, skip_bad: bool) -> Data:
        """Return the evaluation images of `find` as `data.folder.Samples`, without reading an image if labels need no
        image size; `skipped`: images whose size could not be read.

        Raises:
            DataError: as `load`, for the choice and its labels. ImageError: the size of an image cannot be read, and
                `skip_bad` is False.
        """
        check_labels(choice, self.kinds, self.setting.task)
        self.input_files(choice)
        if choice.labels in self.listable:
            labels = choice.labels == "folders"
            parts = folder.list_split(choice.path, "folders" if labels else "none", **choice.numbers)
            return Data(choice.path, (), parts.evaluation, remarks=parts.notes)
        skipped = decoding.Skipped([])
        found = self.find(choice, skipped if skip_bad else None)
        samples = folder.Samples.of(found.parts.evaluation, choice.path)
        notes, doubts = (found.annotated.notes, found.annotated.warnings) if found.annotated is not None else ((), ())
        return Data(
            choice.path,
            (),
            samples,
            truth=found.truth,
            mapping=found.mapping,
            skipped=tuple(skipped.paths),
            remarks=notes,
            doubts=doubts,
        )

    @property
    def reading(self) -> dict[str, object]:
        """Everything besides images and labels that determines which values are kept and how they are counted."""
        return {"postprocess": encode(self.setting.postprocess), "classes": self.setting.classes}

    def kept(self, outputs: Mapping[str, np.ndarray], size: tuple[int, int]) -> Mapping[str, np.ndarray]:
        """Return the values that `count` needs from the outputs for one image."""
        return self.keep(outputs, size)

    @abstractmethod
    def count(self, ours: Answers, reference: Answers, data: Data) -> Counts:
        """Return the counts of some images, from which `comparison` is computed."""

    @abstractmethod
    def comparison(self, counts: OfTask) -> Comparison:
        """Return the comparison for these counts (of `count`) of all images. Raises DataError: as `compare`."""

    def compare(self, ours: Answers, reference: Answers, data: Data) -> Comparison:
        return self.comparison(self.count(ours, reference, data))

    def count_all(self, ours: Answers, reference: Answers, data: Data) -> Counts:
        """As `count`, with the counts of `unrelated` answers to the same images; for a single image, of its own
        answer."""
        counts = self.count(ours, reference, data)
        if not isinstance(counts, Records):
            return counts
        (unrelated,) = self.unrelated(ours, reference, data)
        control = self.count(unrelated, reference, data)
        assert isinstance(control, Records)
        return counts.beside(CONTROL, control)

    def verified(self, counts: Counts) -> Comparison:
        """As `comparison`, for counts from `count_all`, with the control."""
        found = self.comparison(counts)
        if not isinstance(counts, Records) or counts.n < 2:
            return found
        return controlled(found, [self.comparison(counts.part(CONTROL))])

    def facts(self, answers: Answers) -> dict[str, object]:
        """Return the facts that `doubt_counted` needs about the original's answers to some images, as JSON values."""
        return {}

    def doubt(self, reference: Answers, data: Data, found: Comparison) -> str | None:
        return self.doubt_counted(found, [self.facts(reference)], [], data)

    def doubt_counted(
        self, found: Comparison, facts: Sequence[Mapping[str, object]], places: Sequence[folder.Ints], listed: Data
    ) -> str | None:
        """As `doubt`, for shards: the facts of each shard, and the index in `listed` of each image that could be
        read."""
        return doubt_value(found.metric, found.reference_value)
