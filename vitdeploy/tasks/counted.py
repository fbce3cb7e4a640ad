"""Tasks whose comparison is made of what is counted of each image, so that any number of images is judged in shards.

A shard leaves counts; what all shards left, joined, says what the answers to all images at once would say, to the last
bit: `compare` of such a task is made of the same two steps.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from vitdeploy.data import annotations, decoding, folder
from vitdeploy.spec import encode
from vitdeploy.tasks.adapter import Data, DataChoice, ImageAdapter, check_labels, controlled
from vitdeploy.verification.changes import Counts
from vitdeploy.verification.comparison import Comparison, doubt_value
from vitdeploy.verification.records import Answers, Records

Truth = Mapping[Path, annotations.Annotation]
# Before the names of the tables of records that are of the control.
CONTROL = "control "


class CountedAdapter(ImageAdapter):
    """A task that is counted in shards."""

    # Not of two towers, whose classes are texts of the data.
    in_shards = True
    # The kinds of labels of which no file is read before the images of a shard are.
    listable = ("folders", "none")
    # A shard has so many times fewer images than one of a classifier, where the answers to one image are large.
    finer = 1

    def listed(self, choice: DataChoice, *, skip_bad: bool) -> Data:
        """What `find` finds to evaluate on, as `data.folder.Samples`, without reading an image where no labels lie
        beside them; `skipped`: images whose size could not be read.

        Raises:
            DataError: as `load`, of the choice and its labels. ImageError: the size of an image cannot be read, and
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
        """What is kept of an answer, and how it is counted, depends on this besides the images and their labels."""
        return {"postprocess": encode(self.setting.postprocess), "classes": self.setting.classes}

    def kept(self, outputs: Mapping[str, np.ndarray], size: tuple[int, int]) -> Mapping[str, np.ndarray]:
        """What of the outputs for one image `count` is made of."""
        return self.keep(outputs, size)

    @abstractmethod
    def count(self, ours: Answers, reference: Answers, data: Data) -> Counts:
        """What `comparison` is made of, of some images."""

    @abstractmethod
    def comparison(self, counts: Counts) -> Comparison:
        """The comparison that these counts of all images are of. DataError: as `compare`."""

    def compare(self, ours: Answers, reference: Answers, data: Data) -> Comparison:
        return self.comparison(self.count(ours, reference, data))

    def count_all(self, ours: Answers, reference: Answers, data: Data) -> Counts:
        """`count`, with that of `unrelated` answers to the same images; of one image these are its own."""
        counts = self.count(ours, reference, data)
        if not isinstance(counts, Records):
            return counts
        (unrelated,) = self.unrelated(ours, reference, data)
        control = self.count(unrelated, reference, data)
        assert isinstance(control, Records)
        return counts.beside(CONTROL, control)

    def verified(self, counts: Counts) -> Comparison:
        """`comparison` of what `count_all` counted, with its control."""
        found = self.comparison(counts)
        if not isinstance(counts, Records) or counts.n < 2:
            return found
        return controlled(found, [self.comparison(counts.part(CONTROL))])

    def facts(self, answers: Answers) -> dict[str, object]:
        """What `doubt_counted` needs of the original's answers to some images, as JSON values."""
        return {}

    def doubt_counted(
        self, found: Comparison, facts: Sequence[Mapping[str, object]], places: Sequence[folder.Ints], listed: Data
    ) -> str | None:
        """The same of shards: the facts of each, and of each of its images that could be read the place in `listed`."""
        return doubt_value(found.metric, found.reference_value)
