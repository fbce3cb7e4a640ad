"""Where this user's files lie."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path

STORE_VARIABLE = "VITDEPLOY_STORE"


def store_folder() -> Path:
    """The root of this user's store: $VITDEPLOY_STORE, or the user's cache folder."""
    place = os.environ.get(STORE_VARIABLE)
    return Path(place) if place else user_cache_path("vitdeploy")
