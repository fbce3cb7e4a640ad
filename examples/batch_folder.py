"""All images of a folder, answered into one file of JSON lines.

    python examples/batch_folder.py out/digits photos/ -o answers.jsonl

One line per image, sorted by path: {"path": "cats/1.jpg", "label": ..., ...}. The next images are decoded while the
engine runs. Unusable files are listed on standard error and left out; the exit code is then 1. The file appears when
all images are answered, or not at all.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import vitdeploy.runtime
from vitdeploy.errors import InputError, VitdeployError

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp"}
PROGRESS_SECONDS = 5.0


def answer_folder(predictor: vitdeploy.runtime.Predictor, folder: Path, output: Path) -> int:
    """Write `output`; return the number of unusable files."""
    images = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not images:
        raise InputError(f"no images below {folder}", expected=", ".join(sorted(SUFFIXES)))
    bad, start = 0, time.monotonic()
    told = start
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            answers = predictor.stream(images, return_exceptions=True)
            for number, (path, answer) in enumerate(zip(images, answers, strict=True), start=1):
                if isinstance(answer, InputError):
                    bad += 1
                    print(f"{answer.message}: {answer.found}", file=sys.stderr)
                else:
                    name = path.relative_to(folder).as_posix()
                    file.write(json.dumps({"path": name, **answer.to_dict()}) + "\n")
                if (now := time.monotonic()) - told >= PROGRESS_SECONDS:
                    told = now
                    print(f"{number} of {len(images)}, {number / (now - start):.0f} images/s", file=sys.stderr)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(output)
    finally:
        temporary.unlink(missing_ok=True)
    seconds = time.monotonic() - start
    print(f"{output}: {len(images) - bad} answers, {bad} files that cannot be used, {seconds:.1f} s")
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description="Answers for all images of a folder, as JSON lines.")
    parser.add_argument("bundle", type=Path, help="folder of a bundle, as vitdeploy run makes it")
    parser.add_argument("folder", type=Path, help="folder with images, at any depth")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the file to write")
    parser.add_argument("--batch", type=int, choices=range(1, 257), metavar="N", help="images a run of the engine")
    options = parser.parse_args()
    try:
        with vitdeploy.runtime.load(options.bundle, batch=options.batch) as predictor:
            return 1 if answer_folder(predictor, options.folder, options.output) else 0
    except VitdeployError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except OSError as error:  # the output: a missing folder, a full disk, no permission
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
