"""Read claimed accuracies and the licence next to a checkpoint: results of transformers' Trainer, a model card."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vitdeploy.paths import is_file
from vitdeploy.yaml_values import NOT_YAML, read_yaml

# Size limits for a results file, and for a card's front matter, which lists names and numbers.
MAX_BYTES, MAX_FRONT = 16 << 20, 1 << 20
RESULTS = ("eval_results.json", "all_results.json", "trainer_state.json", "config.json")
KEYS = ("eval_accuracy", "eval_top1", "eval_top_1_accuracy")
CARD = "README.md"


def claimed_accuracy(folder: Path) -> tuple[float, str] | None:
    """Return the claimed top-1 accuracy in percent and its file; None without a claim. Unreadable files are ignored."""
    for name in RESULTS:
        for found in _in_results(_json(folder / name)):
            return found, name
    for found in _in_card(_front_matter(folder / CARD)):
        return found, CARD
    return None


def stated_license(folder: Path) -> str | None:
    """Return the licence in the model card, or in timm's configuration; None if they state none."""
    config, card = _json(folder / "config.json"), _front_matter(folder / CARD)
    for document in (card, config.get("pretrained_cfg") if isinstance(config, Mapping) else None):
        if isinstance(document, Mapping):
            stated = document.get("license_name") or document.get("license")
            if isinstance(stated, str) and stated:
                return stated
    return None


def _in_results(document: Any) -> Iterator[float]:
    if not isinstance(document, Mapping):
        return
    history = document.get("log_history")
    entries = [document, *(reversed(history) if isinstance(history, list) else ())]
    for entry in entries:
        for key in KEYS:
            found = _percent(entry.get(key)) if isinstance(entry, Mapping) else None
            if found is not None:
                yield found


def _in_card(document: Any) -> Iterator[float]:
    """https://github.com/huggingface/hub-docs/blob/main/modelcard.md: model-index, results, metrics."""
    for model in _list(document, "model-index"):
        for result in _list(model, "results"):
            for metric in _list(result, "metrics"):
                named = isinstance(metric, Mapping) and str(metric.get("type")).lower() == "accuracy"
                found = _percent(metric.get("value")) if named else None
                if found is not None:
                    yield found


def _list(document: Any, key: str) -> list[Any]:
    found = document.get(key) if isinstance(document, Mapping) else None
    return found if isinstance(found, list) else []


def _percent(value: Any) -> float | None:
    """Return a fraction or a percentage as percent."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return 100 * float(value) if 0 < value <= 1 else float(value) if 1 < value <= 100 else None


def _json(file: Path) -> Any:
    try:
        return json.loads(_text(file))
    except (ValueError, RecursionError):
        return None


def _front_matter(file: Path) -> Any:
    parts = _text(file).split("---\n", 2)
    if len(parts) < 3 or parts[0].strip():
        return None
    try:
        return read_yaml(parts[1]) if len(parts[1]) <= MAX_FRONT else None
    except NOT_YAML:
        return None


def _text(file: Path) -> str:
    try:
        small = is_file(file) and file.stat().st_size <= MAX_BYTES
        return file.read_text(encoding="utf-8", errors="replace") if small else ""
    except OSError:
        return ""
