"""URIs of places for messages, without what may be a secret in them."""

from __future__ import annotations

import re


def shown_uri(uri: str) -> str:
    """A URI as it may be printed: without users, passwords, queries and fragments. A secret may have slashes, so all up
    to the last "@" goes."""
    parts = (re.sub(r"://.*@", "://", part, flags=re.DOTALL) for part in re.split(r"[?#]", uri)[0].split("::"))
    return "::".join(parts)
