"""A Ray cluster for all tests of this folder."""

import pytest

from vitdeploy.workflows.ray_cluster import MODE, TOKEN
from vitdeploy.workflows.ray_pool import DEVICE

NO_RAY = "Ray is not installed: pip install 'vitdeploy[ray]'"


@pytest.fixture(scope="session")
def token(tmp_path_factory):
    """A cluster's token, and ways of these tests: no address is asked without one."""
    path = tmp_path_factory.mktemp("token") / "token"
    path.write_text("0123456789abcdef" * 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MODE, TOKEN)
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        yield path


@pytest.fixture(scope="session")
def cluster(token):
    """The address of a head node and a second node, of one CPU each; the second one measures."""
    pytest.importorskip("ray", reason=NO_RAY)
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    nodes.add_node(num_cpus=1, resources={DEVICE: 1})
    nodes.wait_for_nodes()
    yield nodes.address
    nodes.shutdown()
