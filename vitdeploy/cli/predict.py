"""`vitdeploy predict BUNDLE IMAGE...`: answers for images, with numpy, Pillow and one runtime only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitdeploy.cli.console import Console, output_options
from vitdeploy.cli.trust import trust_option

if TYPE_CHECKING:
    from vitdeploy.runtime.answers import Result


@click.command("predict")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("inputs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--target", default="auto", show_default=True, help="Which engine; auto takes the first that works here.")
@click.option("--top", type=click.IntRange(min=1), default=3, show_default=True, help="How many classes to show.")
@trust_option
@output_options
def command(
    console: Console, bundle: Path, inputs: tuple[Path, ...], target: str, top: int, trust: Path | None
) -> None:
    """What a bundle says to images, or to the token arrays of an .npz file."""
    import warnings

    with warnings.catch_warnings(record=True) as heard:
        document, lines = _answers(console, bundle, inputs, target, top, trust)
    warned = [str(each.message) for each in heard]
    console.finish({**document, "warnings": warned}, [*lines, *(f"warning: {text}" for text in warned)], None)


def _answers(
    console: Console, bundle: Path, inputs: tuple[Path, ...], target: str, top: int, trust: Path | None
) -> tuple[dict[str, Any], list[str]]:
    """The document, and its lines for people."""
    from vitdeploy.bundle.read import read_bundle
    from vitdeploy.runtime import load, load_sequence

    if read_bundle(bundle).task == "sequence":
        from vitdeploy.data.tokens import read_tokens

        with console, load_sequence(bundle, target, trust=trust) as translator:
            sequences = [(path, translator.predict(list(read_tokens(path).source))) for path in inputs]
            engine, why = translator.target, translator.why
        lines = [
            f"{path}[{row}]: {' '.join(map(str, answer.tokens))}"
            for path, answers in sequences
            for row, answer in enumerate(answers)
        ]
        predictions: list[dict[str, Any]] = [
            {"file": str(path), "row": row, **answer.to_dict()}
            for path, answers in sequences
            for row, answer in enumerate(answers)
        ]
    else:
        with console, load(bundle, target, trust=trust) as predictor:
            results = [(image, predictor.predict(image, top)) for image in inputs]
            engine, why = predictor.target, predictor.why
        lines = [f"{image}: {line}" for image, result in results for line in _lines(result)]
        predictions = [{"image": str(image), **result.to_dict()} for image, result in results]
    return {"engine": engine, "why": why, "predictions": predictions}, lines


def _lines(result: Result) -> list[str]:
    """One answer for a person."""
    from vitdeploy.runtime.detection import Detections
    from vitdeploy.runtime.panoptic import Panoptic
    from vitdeploy.runtime.postprocess import Classification

    if isinstance(result, Classification):
        return [", ".join(f"{entry.label} {100 * entry.score:.1f} %" for entry in result.top)]
    if isinstance(result, Detections):
        found = [
            f"{o.label} {100 * o.score:.1f} % at {' '.join(f'{side:.0f}' for side in o.box)}" for o in result.objects
        ]
        return found or ["nothing above the threshold"]
    if isinstance(result, Panoptic):
        area = result.map.size
        shares = [f"{s.label} {100 * s.area / area:.1f} % of the image" for s in result.segments]
        return shares or ["nothing above the threshold"]
    vector = result.vector
    patches = "" if result.patches is None else f", {len(result.patches)} patch vectors"
    return [f"{len(vector)} features: {' '.join(f'{value:.4f}' for value in vector[:4])} ...{patches} (--json has all)"]
