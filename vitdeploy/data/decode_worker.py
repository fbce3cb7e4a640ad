"""A process that decodes images: if a broken file crashes a decoder's native code, no other image is affected.

Standard input: a line with the preprocessing (JSON), then a line per image: a JSON list of its path, its box or null,
the location of its bytes if they are not that file, or null, and its name for messages. Standard output: an empty
object when ready; then for each image, in order, a line with {"size": [width, height]} followed by the pixels, or a
line with {"error": ...}. It exits at the end of its input, so it does not outlive its parent.
"""

import json
import queue
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from vitdeploy.data.containers.uris import load_held, read_written
from vitdeploy.errors import VitdeployError
from vitdeploy.runtime.preprocess import Pixels, load_image
from vitdeploy.spec import PreprocessSpec, decode

# Images at URIs fetched ahead while one is decoded: at least as many as the parent sends ahead.
FETCHED_AHEAD = 4


def main() -> int:
    lines, out = sys.stdin.buffer, sys.stdout.buffer
    spec = decode(PreprocessSpec, json.loads(lines.readline()))
    try:
        out.write(b"{}\n")
        out.flush()
        for question in _questions(lines):
            try:
                pixels, size = question.answer(spec)
                out.write(json.dumps({"size": size}).encode() + b"\n" + pixels.tobytes())
            except VitdeployError as error:
                out.write(json.dumps({"error": error.to_dict()}).encode() + b"\n")
            out.flush()
    except BrokenPipeError:  # the parent has closed the pipe
        sys.stdout = None  # otherwise Python flushes it again at exit
        return 1
    return 0


class _Question:
    """A requested image; the fetch of a URI starts here."""

    def __init__(self, line: bytes, pool: ThreadPoolExecutor) -> None:
        path, self._box, written, self._name = json.loads(line)
        self._path = Path(path)
        self._held = read_written(written)
        self._content: Future[bytes] | None = None
        if self._held is not None and self._held.uri is not None:
            self._content = pool.submit(self._held.read, self._name)

    def answer(self, spec: PreprocessSpec) -> tuple[Pixels, tuple[int, int]]:
        if self._content is not None:
            return load_image(self._content.result(), spec, self._box, self._name)
        return load_held(self._path, self._held, spec, self._box, self._name)


def _questions(lines: IO[bytes]) -> Iterator[_Question]:
    """Yield the request on each line, in order, with a few lines read ahead."""
    waiting: queue.Queue[Any] = queue.Queue(FETCHED_AHEAD)
    pool = ThreadPoolExecutor(FETCHED_AHEAD)

    def read() -> None:
        try:
            for line in lines:
                waiting.put(_Question(line, pool))
            waiting.put(None)
        except BaseException as error:
            waiting.put(error)

    threading.Thread(target=read, daemon=True).start()
    while (found := waiting.get()) is not None:
        if isinstance(found, BaseException):
            raise found
        yield found


if __name__ == "__main__":
    sys.exit(main())
