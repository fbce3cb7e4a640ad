"""The key of an artifact: SHA-256 over everything that it depends on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

FORMAT = 2


def canonical_json(value: Any) -> str:
    """The one text of a JSON value: sorted keys, no spaces, finite numbers only."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True)


def artifact_key(kind: str, config: Mapping[str, Any], inputs: Mapping[str, str], tools: Mapping[str, str]) -> str:
    """The key of the result of stage `kind` for `config`, inputs with these digests, and these tools."""
    parts = {
        "format": FORMAT,
        "kind": kind,
        "config": dict(config),
        "inputs": dict(inputs),
        "tools": dict(tools),
    }
    return hashlib.sha256(canonical_json(parts).encode()).hexdigest()
