"""A smaller input that still fails: delta debugging by pieces, then byte by byte.

Source: Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input, IEEE TSE 28(2), 2002.
"""

from __future__ import annotations

import time
from collections.abc import Callable


def minimised(data: bytes, fails: Callable[[bytes], bool], deadline: float) -> bytes:
    """The smallest input found until `deadline` (`time.monotonic`); `data` itself where it does not fail again."""
    if not fails(data):
        return data
    size = max(1, len(data) // 2)
    while size and time.monotonic() < deadline:
        at, smaller = 0, False
        while at < len(data) and time.monotonic() < deadline:
            without = data[:at] + data[at + size :]
            if fails(without):
                data, smaller = without, True
            else:
                at += size
        if not smaller or size > 1:
            size //= 2
    return _plain(data, fails, deadline)


def _plain(data: bytes, fails: Callable[[bytes], bool], deadline: float) -> bytes:
    """Bytes that do not matter become "0", so that those that do are seen."""
    for at in range(len(data)):
        if time.monotonic() > deadline:
            break
        plain = data[:at] + b"0" + data[at + 1 :]
        if data[at : at + 1] != b"0" and fails(plain):
            data = plain
    return data
