"""The predictor of encoder-decoders for apps: tokens in, tokens out."""

from collections.abc import Sequence as SequenceOf
from functools import partial
from pathlib import Path
from typing import Any

from vitdeploy.bundle.checked import Verify, open_checked, retry_if_replaced
from vitdeploy.errors import TargetError
from vitdeploy.runtime import choice, sequence
from vitdeploy.runtime.load import bundle_folder
from vitdeploy.runtime.runner import Reloaded


class SequencePredictor(Reloaded):
    """Decodes with the engines of one bundle, `target`. Use as a context manager, or call `close`."""

    def __init__(self, runner: sequence.SequenceRunner, why: str = "") -> None:
        runner.load()
        self.runner, self.why = runner, why

    @property
    def target(self) -> str:
        return self.runner.name

    def predict(self, sources: SequenceOf[SequenceOf[int]]) -> list[sequence.Sequence]:
        """Return one answer per source; a source is a list of token numbers, padded or not.

        Raises:
            TensorError: a source is empty, too long, or has a token outside the vocabulary.
        """
        return self.runner.predict(sources)

    def close(self) -> None:
        self.runner.close()


def load_sequence(
    path: str | Path,
    target: str = choice.AUTO,
    *,
    threads: int = 0,
    trust: Path | None = None,
    allow_failed: bool = False,
    verify: Verify = "used",
    expect_digest: str | None = None,
) -> SequencePredictor:
    """Return the predictor of an encoder-decoder's bundle. Arguments, choice of engine and checks are as for `load`.

    Raises:
        TargetError: a bundle for another task. Otherwise as `load`.
    """
    folder = bundle_folder(path)
    how: dict[str, Any] = {
        "trust": trust,
        "allow_failed": allow_failed,
        "verify": verify,
        "expect_digest": expect_digest,
    }

    def read() -> SequencePredictor:
        files = open_checked(folder, verify, expect_digest, trust)
        manifest = files.manifest
        if manifest.task != "sequence":
            raise TargetError(
                f"the bundle {manifest.name} does not take tokens",
                found=f"the task {manifest.task}",
                expected="a bundle with the task sequence",
                fix="vitdeploy.runtime.load(BUNDLE)",
            )
        runner, _, why = choice.choose_engine(
            folder, manifest, target, threads, trust, allow_failed=allow_failed, files=files
        )
        assert isinstance(runner, sequence.SequenceRunner)
        predictor = SequencePredictor(runner, why)
        predictor.again = partial(load_sequence, folder.absolute(), target, threads=threads, **how)
        return predictor

    return retry_if_replaced(folder, read)
