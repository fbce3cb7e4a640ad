"""Small data sets as strangers write them."""

import io
import json
import tarfile  # noqa: TID251 - written for tests

import numpy as np
from PIL import Image


def picture(seed, form="png"):
    """The bytes of an image, another one for each seed."""
    pixels = np.random.default_rng(seed).integers(0, 256, (12, 10, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, form)
    return buffer.getvalue()


def sample(key, label=None, seed=0, **further):
    """The members of one sample of a tar."""
    found = {f"{key}.png": picture(seed)}
    if label is not None:
        found[f"{key}.cls"] = str(label).encode()
    return {**found, **{f"{key}.{suffix}": content for suffix, content in further.items()}}


def write_tar(path, *samples, members=()):
    """A tar of these samples; `members` are (TarInfo, content) behind them."""
    with tarfile.open(path, "w") as tar:
        for name, content in (each for members in samples for each in members.items()):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return path


def features(names):
    """What Hugging Face's `datasets` writes into a schema."""
    label = {"_type": "Value", "dtype": "int64"} if names is None else {"_type": "ClassLabel", "names": list(names)}
    info = {"info": {"features": {"image": {"_type": "Image"}, "label": label}}}
    return {b"huggingface": json.dumps(info).encode()}


def table(labels, names=None, seeds=None, **columns):
    """A table as `datasets` has it: images with bytes and path, and labels; () without."""
    import pyarrow as pa

    count = len(seeds if seeds is not None else labels)
    images = [{"bytes": picture(seed), "path": f"{seed}.png"} for seed in (seeds or range(count))]
    found = {"image": pa.array(images, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))}
    if len(labels):
        found["label"] = pa.array(labels)
    return pa.table({**found, **columns}).replace_schema_metadata(features(names))
