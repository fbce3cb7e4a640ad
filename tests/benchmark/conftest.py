"""Here it is tested what a loaded machine decides, so its limits are those of the product."""

import pytest

from vitdeploy.benchmark import evidence as quiet
from vitdeploy.benchmark import summary as decided

# As they are when tests are collected: `undisturbed`, for all other tests, comes after that.
NAMES = ((quiet, "TAKEN_SHARE"), (decided, "WILD_SPREAD"), (decided, "APART_REACH"))
LIMITS = [(module, name, getattr(module, name)) for module, name in NAMES]


@pytest.fixture(autouse=True)
def limits(undisturbed, monkeypatch):
    for module, name, value in LIMITS:
        monkeypatch.setattr(module, name, value)
