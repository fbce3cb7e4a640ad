"""Which executor a name is, and how a Ray cluster is reached: addresses, tokens, releases and stores."""

import os
import socket
import subprocess
import sys

import pytest

from tests.conftest import NO_RAY, ROOT
from tests.workflows import pieces
from vitdeploy.errors import InputError, MissingPackageError, WorkerError
from vitdeploy.store.store import SHARED_VARIABLE
from vitdeploy.workflows.executors import MODE, TOKEN, Processes, RayCluster, executor_of


def test_what_ray_tells_of_a_task_that_died_is_not_where_the_result_goes(cluster, tmp_path, capsys):
    assert dict(RayCluster(cluster).map(pieces.dies, [(str(tmp_path), 1)])) == {0: 1}
    assert capsys.readouterr().out == ""


def test_a_cluster_of_this_machine_is_started_and_ended_for_a_user_who_has_no_token_yet(tmp_path):
    pytest.importorskip("ray", reason=NO_RAY)
    code = """
from tests.workflows.pieces import squared
from vitdeploy.workflows.executors import RayCluster
assert dict(RayCluster().map(squared, [2])) == {0: 4}
import ray
assert not ray.is_initialized()
"""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment = {**ours, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / ".ray" / "auth_token").is_file()


@pytest.mark.parametrize(
    ("text", "at_a_time", "executor"),
    [
        (None, 1, None),
        ("ray", 1, RayCluster("", None)),
        ("ray:10.0.0.5:6379", 3, RayCluster("10.0.0.5:6379", 3)),
        ("ray:ray://head:10001", 1, RayCluster("ray://head:10001", None)),
    ],
)
def test_executors_by_name(text, at_a_time, executor):
    assert executor_of(text, at_a_time) == executor


@pytest.mark.parametrize(("text", "at_a_time", "count"), [(None, 3, 3), ("processes", 1, 1), ("processes", 2, 2)])
def test_processes_by_name(text, at_a_time, count):
    executor = executor_of(text, at_a_time)
    assert isinstance(executor, Processes) and executor.count == count


@pytest.mark.parametrize("text", ["", "spark", "processes:4", "Ray"])
def test_another_name_is_refused(text):
    with pytest.raises(InputError, match="unknown executor"):
        executor_of(text, 1)


@pytest.mark.parametrize("address", ["10.0.0.5:6379", "ray://gpu.example.org:10001", "[2001:db8::1]:6379"])
def test_an_address_on_the_network_is_not_asked_without_a_token(address, monkeypatch):
    pytest.importorskip("ray", reason=NO_RAY)
    monkeypatch.delenv(MODE, raising=False)
    with pytest.raises(InputError, match="is on the network and needs a token") as caught:
        list(RayCluster(address).map(pieces.squared, [1]))
    assert f"export {MODE}={TOKEN}" in caught.value.fix


@pytest.mark.parametrize("address", ["nowhere", "host:port", "10.0.0.5"])
def test_what_is_no_address_is_told(address):
    pytest.importorskip("ray", reason=NO_RAY)
    with pytest.raises(InputError, match="invalid address of a Ray cluster"):
        list(RayCluster(address).map(pieces.squared, [1]))


def test_a_cluster_that_is_not_there_is_told_at_once():
    pytest.importorskip("ray", reason=NO_RAY)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(WorkerError, match="does not answer"):
        list(RayCluster(f"127.0.0.1:{port}").map(pieces.squared, [1]))


OTHER_TOKEN = """
import sys
from tests.workflows import pieces
from vitdeploy.errors import WorkerError
from vitdeploy.workflows.executors import RayCluster
try:
    list(RayCluster(sys.argv[1]).map(pieces.squared, [1]))
except WorkerError as error:
    print(error.message)
"""


def test_another_token_does_not_get_in(cluster, tmp_path):
    """In a process of its own, as a process reads its token once."""
    (tmp_path / "token").write_text("f" * 64)
    # Ray asks again each second, 20 times by default.
    environment = {**os.environ, "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token"), "RAY_NUM_REDIS_GET_RETRIES": "2"}
    words = [sys.executable, "-c", OTHER_TOKEN, cluster]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == f"the Ray cluster {cluster} cannot be used\n", done.stderr[-2000:]


def test_several_machines_need_a_store_that_they_share(cluster, monkeypatch):
    import ray

    machines = [{"NodeManagerAddress": f"10.0.0.{number}", "Alive": True} for number in (1, 2)]
    monkeypatch.delenv(SHARED_VARIABLE, raising=False)
    monkeypatch.setattr(ray, "nodes", lambda: machines)
    with pytest.raises(InputError, match="the cluster has 2 machines"):
        list(RayCluster(cluster).map(pieces.squared, [1]))


def test_without_ray_the_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingPackageError, match="needs the package ray") as caught:
        list(RayCluster().map(pieces.squared, [1]))
    assert "vitdeploy[ray]" in caught.value.fix
