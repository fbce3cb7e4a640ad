"""The scenes' command line: see `python -m calibration.scenes --help`."""

from __future__ import annotations

import argparse
from pathlib import Path

from calibration.scenes.stream import KINDS
from calibration.scenes.write import render


def train(arguments: argparse.Namespace) -> None:
    """Train one model, or all."""
    from calibration.scenes.training.train import FOLDER, MODELS
    from calibration.scenes.training.train import train as train_one

    for name in MODELS if arguments.model == "all" else (arguments.model,):
        train_one(name, arguments.output or FOLDER, hold_out=arguments.hold_out, steps=arguments.steps)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m calibration.scenes", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("render", help="write pictures and labels of a kind")
    writing.add_argument("kind", choices=KINDS)
    writing.add_argument("folder", type=Path, help="new or empty")
    writing.add_argument("--training", type=int, default=0, help="number of training pictures (default 0)")
    writing.add_argument("--calibration", type=int, default=64, help="number of calibration pictures (default 64)")
    writing.add_argument("--evaluation", type=int, default=200, help="number of evaluation pictures (default 200)")
    training = commands.add_parser("train", help="train a model again; needs transformers")
    training.add_argument("model", help="the name of a module of training, such as detection; or all")
    training.add_argument("--output", type=Path, help="folder of the models' folders (default: where they are)")
    training.add_argument("--hold-out", action="store_true", help="measure on calibration scenes and write nothing")
    training.add_argument("--steps", type=int, help="fewer steps than the recipe's")
    arguments = parser.parse_args()
    if arguments.command == "train":
        train(arguments)
        return
    counts = {split: getattr(arguments, split) for split in ("training", "calibration", "evaluation")}
    try:
        render(arguments.kind, arguments.folder, counts)
    except (FileExistsError, ValueError) as error:
        parser.error(str(error))
    print(f"{arguments.folder}: {', '.join(f'{count} {split}' for split, count in counts.items() if count)} pictures")


if __name__ == "__main__":
    main()
