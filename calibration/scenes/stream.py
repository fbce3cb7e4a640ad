"""The random numbers of a scene: a stream of its own for each kind, split and index.

A scene does not depend on how many were drawn before it. Streams are numpy's `RandomState`, which is frozen
(docs/adr/0001); no two splits share a seed, so no evaluation scene is ever a training scene.
"""

from __future__ import annotations

import numpy as np

# Places in these tuples are part of the seeds: add at the end.
KINDS = (
    *("detection", "prompted", "semantic", "captions", "zero-shot", "depth", "keypoints", "text", "anomaly"),
    *("foreground", "identities", "digits", "counts"),
)
SPLITS = ("training", "calibration", "evaluation")


def stream(kind: str, split: str, index: int) -> np.random.RandomState:
    """The generator of scene `index` of a split."""
    return np.random.RandomState([KINDS.index(kind), SPLITS.index(split), index])
