"""The parts of a report that are made of single answers: `answers` and `examples`, of a classifier's."""

import numpy as np

from vitdeploy.spec import encode
from vitdeploy.verification.classes import Classified, by_class, confusion, reliability


def answered(engines, classes=20, images=400, names=None, wrong=0.3):
    """`answers` of an original and engines, of which the first loses most of the last class."""
    random = np.random.default_rng(0)
    truth = np.arange(images) % classes
    names = names or [f"class {i}" for i in range(classes)]
    found = {}
    for name in ("original", *engines):
        answer = np.where(random.random(images) < wrong, random.integers(0, classes, images), truth)
        found[name] = Classified(truth, answer, random.uniform(0.2, 1, images))
    lost = Classified(truth, np.where(truth == classes - 1, 0, found["original"].answer), found["original"].confidence)
    found[engines[0]] = lost
    original, others = found["original"], {name: found[name] for name in engines}
    facts = {
        "changed": {name: {"changed": 30, "lost": 20, "gained": 4} for name in engines},
        "confusion": confusion(found, names),
        "classes": by_class(original, others, names),
        "reliability": {name: reliability(each) for name, each in found.items()},
    }
    return encode(facts)


def example(number, why, engines, label="cat", reference="cat", answers=(), marks=None, image="0.png"):
    """One of `examples`; `answers` of the first engines, the others answer as the original."""
    said = [*answers, *[reference] * (len(engines) - len(answers))]
    return {
        "number": number,
        "why": why,
        "sample": f"evaluation/{label}/{number}.png",
        "image": image,
        "label": label,
        "reference": {"label": reference, "score": 0.9},
        "engines": {name: {"label": each, "score": 0.8} for name, each in zip(engines, said, strict=True)},
        "differing": [name for name, each in zip(engines, said, strict=True) if each != reference],
        "marks": marks and {"engine": engines[0], **marks},
    }
