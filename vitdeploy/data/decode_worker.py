"""A process that decodes images: if a broken file crashes a decoder's native code, no other image is affected.

Standard input: a line with the preprocessing (JSON), then a line per image: a JSON list of its path, and its box or
null. Standard output: an empty object when it is ready; then for each image, in order, a line with {"size": [width,
height]} followed by the pixels, or a line with {"error": ...}. It ends with its input, so it does not outlive its
parent.
"""

from __future__ import annotations

import json
import sys

from vitdeploy.errors import VitdeployError
from vitdeploy.runtime.preprocess import load_image
from vitdeploy.spec import PreprocessSpec, decode


def main() -> int:
    lines, out = sys.stdin.buffer, sys.stdout.buffer
    spec = decode(PreprocessSpec, json.loads(lines.readline()))
    try:
        out.write(b"{}\n")
        out.flush()
        for line in lines:
            try:
                path, box = json.loads(line)
                pixels, size = load_image(path, spec, box)
                out.write(json.dumps({"size": size}).encode() + b"\n" + pixels.tobytes())
            except VitdeployError as error:
                out.write(json.dumps({"error": error.to_dict()}).encode() + b"\n")
            out.flush()
    except BrokenPipeError:  # nobody wants the answer any more
        sys.stdout = None  # or Python flushes it once more at its end
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
