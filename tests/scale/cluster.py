"""A Ray cluster of two nodes on this machine, with a token, for the rows that need one."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import HEAD_NODE
from tests.scale.row import Missing


@contextlib.contextmanager
def two_nodes(work: Path) -> Iterator[str]:
    """The address of a head node and a second node, of one CPU each. What asks it has its token in the environment."""
    if importlib.util.find_spec("ray") is None:
        raise Missing("Ray is not installed: pip install 'vitdeploy[ray]'")
    token = work / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    os.environ.update(
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN_PATH=str(token),
        RAY_USAGE_STATS_ENABLED="0",
        RAY_ENABLE_UV_RUN_RUNTIME_ENV="0",
    )
    from ray.cluster_utils import Cluster  # it reads the environment when it is imported

    nodes = Cluster(initialize_head=True, head_node_args=HEAD_NODE)
    try:
        nodes.add_node(num_cpus=1)
        nodes.wait_for_nodes()
        yield nodes.address
    finally:
        nodes.shutdown()
