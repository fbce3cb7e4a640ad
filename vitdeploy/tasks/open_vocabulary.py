"""Open-vocabulary detection: labelled boxes whose categories become texts, and COCO's mAP."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from vitdeploy.data import annotations, classes, decoding, detection, label_file
from vitdeploy.errors import CapabilityError, DataError
from vitdeploy.progress import Progress
from vitdeploy.runtime.flow import FlowRunner
from vitdeploy.runtime.runner import Runner
from vitdeploy.runtime.tasks.detection import Detections
from vitdeploy.runtime.tasks.open_vocabulary import TextsFound, head_of, within
from vitdeploy.runtime.tokenizer import OpenVocabularySpec
from vitdeploy.tasks.adapter import Calibration, Data, DataChoice, ImageAdapter, Setting
from vitdeploy.tasks.detection import DetectionAdapter
from vitdeploy.tasks.images import FoundData
from vitdeploy.tasks.zero_shot import TextAdapter, mapping_text, places, texts_of
from vitdeploy.verification.records import Answers


class OpenVocabularyAdapter(TextAdapter, DetectionAdapter):
    """An open-vocabulary detector. Its texts are from a file, or made from the categories' names with the template."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        assert isinstance(self.spec, OpenVocabularySpec)
        self.head = head_of(self.spec)
        self.found: tuple[str, ...] = ()

    def detect(self, answers: Answers, index: int, threshold: float, labels: Sequence[str] | None) -> Detections:
        return within(super().detect(answers, index, threshold, labels))

    def find(self, choice: DataChoice, skipped: decoding.Skipped | None = None) -> FoundData:
        """Return the images and their boxes; sets `found` to the texts."""
        listed = label_file.read_texts(choice.texts) if choice.texts is not None else None
        if choice.annotations is None or choice.labels == "none":
            if not listed:
                raise _no_texts(choice.path)
            found = ImageAdapter.find(self, choice, skipped)
            self.require_apart(listed)
            self.found = listed
            return replace(found, parts=replace(found.parts, classes=listed))
        kind: Literal["yolo", "coco"] = "yolo" if choice.labels == "yolo" else "coco"
        found_set = detection.read_detection(choice.path, choice.annotations, kind, skipped)
        used = {int(c) for boxes in found_set.annotations.values() for c in boxes.classes}
        names = _names(found_set.categories)
        texts, mapping = self._mapped(
            choice, names, listed, classes.match_categories(found_set.categories, used, names, None)
        )
        truth = {path: boxes.renumbered(mapping.index) for path, boxes in found_set.annotations.items()}
        self.found = texts
        return FoundData(replace(found_set.split(**choice.numbers), classes=texts), found_set, truth, mapping)

    def _mapped(
        self, choice: DataChoice, names: tuple[str, ...], listed: tuple[str, ...] | None, own: classes.ClassMap
    ) -> tuple[tuple[str, ...], classes.ClassMap]:
        """Return the texts, and the text of each category."""
        written = texts_of(names, choice.template)
        texts = written if listed is None else listed
        place = places(names, written, texts, "categories")
        self.require_apart(texts)
        index = {category: place[position] for category, position in own.index.items()}
        return texts, classes.ClassMap("name", index, mapping_text("categories", written, choice))

    def load(self, choice: DataChoice, *, skip_bad: bool, progress: Progress) -> Data:
        data = DetectionAdapter.load(self, choice, skip_bad=skip_bad, progress=progress)
        return self.with_texts(replace(data, classes=self.found))

    def calibration(self, choice: DataChoice, *, skip_bad: bool, progress: Progress) -> Calibration:
        found = ImageAdapter.calibration(self, choice, skip_bad=skip_bad, progress=progress)
        listed = label_file.read_texts(choice.texts) if choice.texts is not None else ()
        if not listed and choice.annotations is not None:
            listed = self.find(choice).parts.classes
        if not listed:
            raise _no_texts(choice.path)
        return replace(found, texts=listed)

    def bound(self, runner: Runner, data: Data) -> Runner:
        if not isinstance(runner, FlowRunner):
            raise CapabilityError(
                "this version cannot verify an open-vocabulary detector on a device",
                found=runner.name,
                expected="engines on this machine",
                fix="remove --on; `vitdeploy inspect BUNDLE --check` on the device compares golden answers",
            )
        return TextsFound(runner, self.tokens(data.classes)[0], self.spec)


def _no_texts(folder: Path) -> DataError:
    return DataError(
        f"{folder} provides no texts to search for in its images",
        found="no categories, and no text file",
        expected="texts, one per line, as in later use",
        fix="--texts FILE (data.texts in a recipe); or labels: coco, whose categories become texts by the template",
    )


def _names(categories: Sequence[annotations.Category]) -> tuple[str, ...]:
    return tuple(str(category.name).strip() for category in sorted(categories, key=lambda category: category.id))
