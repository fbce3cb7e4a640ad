"""`vitdeploy predict BUNDLE IMAGE...`: answers for images, with numpy, Pillow and one runtime only."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitdeploy.cli.console import Console, output_options
from vitdeploy.cli.inputs import Input, find_inputs
from vitdeploy.cli.options import engine_option, trust_option
from vitdeploy.errors import InputError

if TYPE_CHECKING:
    from vitdeploy.runtime.predictor import Predictor
    from vitdeploy.runtime.sequence_predictor import SequencePredictor

Answers = list[tuple[Input, list[dict[str, Any]], list[str]]]
Failures = list[tuple[Input, InputError]]


@click.command("predict")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("inputs", nargs=-1, required=True, type=click.Path(allow_dash=True))
@engine_option
@click.option("--top", type=click.IntRange(min=1), default=3, show_default=True, help="How many classes to show.")
@trust_option
@output_options
def command(console: Console, bundle: Path, inputs: tuple[str, ...], target: str, top: int, trust: Path | None) -> None:
    """Run a bundle on images, or on the token arrays of .npz files.

    INPUTS are files, folders (every image below them), quoted patterns such as 'shots/**/*.png', and - for an image on
    standard input. JPEG, PNG, WebP, BMP, TIFF and GIF are read, and the first of several frames. Inputs that cannot be
    read are named, the others are answered, and the exit code is 2.
    """
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        engine, why, found, answered, failed = _run(console, bundle, inputs, target, top, trust)
    if failed and len(found) == 1:
        raise failed[0][1]
    warned = list(dict.fromkeys(str(each.message) for each in heard))
    lines = [f"{given.name}{line}" for given, _, texts in answered for line in texts]
    lines += [_failure(given, error) for given, error in failed]
    if failed:
        lines.append(f"{len(answered)} of {len(found)} inputs are answered")
    document = {
        "engine": engine,
        "why": why,
        "predictions": [prediction for _, predictions, _ in answered for prediction in predictions],
        "errors": [{"input": given.name, **error.to_dict()} for given, error in failed],
        "warnings": warned,
    }
    console.finish(document, [*lines, *(f"warning: {text}" for text in warned)], None)
    if failed:
        click.get_current_context().exit(InputError.exit_code)


def _run(
    console: Console, bundle: Path, texts: Sequence[str], target: str, top: int, trust: Path | None
) -> tuple[str, str, list[Input], Answers, Failures]:
    """(engine, why it, all inputs, those that are answered, those that cannot be)."""
    from vitdeploy.bundle.read import read_bundle
    from vitdeploy.runtime import load, load_sequence

    if read_bundle(bundle).task == "sequence":
        found = find_inputs(texts, console.note, tokens=True)
        with console, load_sequence(bundle, target, trust=trust) as translator:
            answered, failed = _translate(console, translator, found)
            return translator.target, translator.why, found, answered, failed
    found = find_inputs(texts, console.note)
    with console, load(bundle, target, trust=trust) as predictor:
        answered, failed = _answer(console, predictor, found, top)
        return predictor.target, predictor.why, found, answered, failed


def _answer(console: Console, predictor: Predictor, found: Sequence[Input], top: int) -> tuple[Answers, Failures]:
    answered: Answers = []
    failed: Failures = []
    results = predictor.stream((each.image for each in found), top, return_exceptions=True)
    for done, (given, result) in enumerate(zip(found, results, strict=True), start=1):
        if isinstance(result, InputError):
            failed.append((given, result))
        else:
            lines = [f": {line}" for line in str(result).split("\n")]
            answered.append((given, [{"image": given.name, **result.to_dict()}], lines))
        if len(found) > 1:
            console.progress("predict", done, len(found))
    return answered, failed


def _translate(console: Console, translator: SequencePredictor, found: Sequence[Input]) -> tuple[Answers, Failures]:
    from vitdeploy.data.tokens import read_tokens

    answered: Answers = []
    failed: Failures = []
    for done, given in enumerate(found, start=1):
        try:
            answers = translator.predict(list(read_tokens(Path(given.name)).source))
        except InputError as error:
            failed.append((given, error))
            continue
        rows = [{"file": given.name, "row": row, **answer.to_dict()} for row, answer in enumerate(answers)]
        lines = [f"[{row}]: {' '.join(map(str, answer.tokens))}" for row, answer in enumerate(answers)]
        answered.append((given, rows, lines))
        if len(found) > 1:
            console.progress("predict", done, len(found))
    return answered, failed


def _failure(given: Input, error: InputError) -> str:
    """One line: several inputs may be wrong."""
    found = f" ({error.found})" if error.found else ""
    message = error.message if given.name in error.message else f"{given.name}: {error.message}"
    return f"{error.code}  {message}{found}"
