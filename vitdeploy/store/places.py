"""Where this user's files lie."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path

from vitdeploy.store.shared import SharedStore

STORE_VARIABLE = "VITDEPLOY_STORE"
SHARED_VARIABLE = "VITDEPLOY_SHARED_STORE"


def store_folder() -> Path:
    """The root of this user's store: $VITDEPLOY_STORE, or the user's cache folder."""
    place = os.environ.get(STORE_VARIABLE)
    return Path(place) if place else user_cache_path("vitdeploy")


def shared_store() -> SharedStore | None:
    """The store that this user shares with other machines: $VITDEPLOY_SHARED_STORE, a URL."""
    url = os.environ.get(SHARED_VARIABLE)
    return SharedStore(url) if url else None
