"""`vitdeploy predict BUNDLE IMAGE...`: classify images, with numpy, Pillow and one runtime only."""

from __future__ import annotations

from pathlib import Path

import click

from vitdeploy.cli.console import Console, output_options


@click.command("predict")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("images", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--target", default="auto", show_default=True, help="Which engine; auto takes the first that works here.")
@click.option("--top", type=click.IntRange(min=1), default=3, show_default=True, help="How many classes to show.")
@output_options
def command(console: Console, bundle: Path, images: tuple[Path, ...], target: str, top: int) -> None:
    """Classify images with a bundle."""
    from vitdeploy.runtime import load

    with console, load(bundle, target) as predictor:
        results = [(image, predictor.predict(image, top)) for image in images]
        engine = predictor.target
    lines = [
        f"{image}: " + ", ".join(f"{entry.label} {100 * entry.score:.1f} %" for entry in result.top)
        for image, result in results
    ]
    document = {
        "engine": engine,
        "predictions": [{"image": str(image), **result.to_dict()} for image, result in results],
    }
    console.finish(document, lines, None)
