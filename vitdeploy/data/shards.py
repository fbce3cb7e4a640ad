"""Cuts a sorted list of names into shards where the names themselves say so: a list with one name more or less has all
but a few of its shards unchanged.

This is content-dependent chunking, as of backups and file systems that store equal parts of files once (Muthitacharoen,
Chen and Mazieres 2001, "A low-bandwidth network file system"), with names in place of bytes. A cut follows each name
whose hash is the least among those of `WINDOW` names before and after it, the local extreme of Bjorner, Blass and
Gurevich 2010 ("Content-dependent chunking for differential compression, the local maximum approach"). With a threshold
on the hash, as the former have it, least and largest sizes have to be forced, and one name more can move all cuts after
it; here it moves only cuts that are less than a window away.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from vitdeploy.paths import name_bytes

# Shards hold more than WINDOW names, 2 * WINDOW + 1 in the mean, and MOST at most.
WINDOW, MOST = 256, 2048

Hashes = npt.NDArray[np.uint64]


def cut(names: Iterable[str], window: int = WINDOW, most: int = MOST) -> list[range]:
    """The shards of a list of names, as ranges of its indices: all in order, the same on every machine.

    One name more or less changes at most three shards; more of them only where a stretch without any cut is longer than
    `most`, and is divided. A list of up to 2 * `window` names is one shard.

    Args:
        window: a shard has more names than that; the last one may have just as many, or all names of a shorter list.
        most: at least 4 * `window` + 4.
    """
    if window < 1 or most < 4 * window + 4:
        raise ValueError(f"shards of {most} names at most, and windows of {window}")
    hashes = _hashes(names)
    bounds = [0, *_cuts(hashes, window), len(hashes)]
    found: list[range] = []
    for start, end in itertools.pairwise(bounds):
        found += _divided(hashes, range(start, end), most)
    return [shard for shard in found if shard]


def _hashes(names: Iterable[str]) -> Hashes:
    """The first 64 bits of each name's BLAKE2b; what is no UTF-8 in a name counts by its bytes."""
    digests = (hashlib.blake2b(name_bytes(name), digest_size=8).digest() for name in names)
    return np.frombuffer(b"".join(digests), ">u8").astype(np.uint64)


def _cuts(hashes: Hashes, window: int) -> list[int]:
    """The index after each name that a shard ends with. Two such names are more than a window apart, so at most the
    least of any window + 1 names is one."""
    found = []
    for start in range(0, len(hashes), window + 1):
        index = start + int(hashes[start : start + window + 1].argmin())
        if window <= index < len(hashes) - window:
            around = hashes[index - window : index + window + 1]
            if int((around <= hashes[index]).sum()) == 1:
                found.append(index + 1)
    return found


def _divided(hashes: Hashes, shard: range, most: int) -> list[range]:
    """The shard; where it is longer than `most` two of it, each a quarter at least, and these in the same way."""
    if len(shard) <= most:
        return [shard]
    quarter = len(shard) // 4
    inner = hashes[shard.start + quarter : shard.stop - quarter]
    middle = shard.start + quarter + int(inner.argmin()) + 1
    both = (range(shard.start, middle), range(middle, shard.stop))
    return [part for each in both for part in _divided(hashes, each, most)]
