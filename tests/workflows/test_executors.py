"""Pieces of work in processes of this machine, and on a real Ray cluster of two nodes: the same results and errors."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import NO_RAY, ROOT
from tests.workflows import pieces
from vitdeploy.errors import DataError, InputError, MissingPackageError, WorkerError
from vitdeploy.workflows import executors as ray_cluster
from vitdeploy.workflows import executors as ray_pool
from vitdeploy.workflows.executors import DEVICE, MODE, TOKEN, Processes, RayCluster, executor_of


@pytest.fixture(scope="module", params=["processes", "ray"])
def executor(request):
    return Processes(2) if request.param == "processes" else RayCluster(request.getfixturevalue("cluster"))


def test_every_piece_has_its_result_or_its_error(executor):
    found = dict(executor.map(pieces.squared, [3, -1, 0, 5]))
    error = found.pop(1)
    assert found == {0: 9, 2: 0, 3: 25}
    assert isinstance(error, DataError) and (error.found, error.wanted) == ("-1", "0 or more")


def test_without_pieces_there_is_nothing(cluster):
    assert list(RayCluster(cluster).map(pieces.squared, [])) == []


def test_what_nobody_expected_is_not_hidden(executor):
    with pytest.raises(ZeroDivisionError, match="nobody expected 7"):
        list(executor.map(pieces.surprised, [7]))


@pytest.mark.parametrize(("deaths", "result"), [(1, 1), (2, 2)])
def test_a_task_whose_process_is_killed_is_started_again(cluster, tmp_path, deaths, result, capsys):
    assert dict(RayCluster(cluster).map(pieces.dies, [(str(tmp_path), deaths)])) == {0: result}
    assert capsys.readouterr().out == ""  # Ray tells of it, and not where the result goes


def test_a_task_that_always_dies_is_named_and_the_rest_goes_on(cluster, tmp_path):
    found = dict(RayCluster(cluster).map(pieces.dies, [(str(tmp_path), 99), (str(tmp_path / ".."), 0)]))
    assert isinstance(found[0], WorkerError) and found[0].message == "a task died 3 times"
    assert isinstance(found[1], int) and len(list(tmp_path.iterdir())) == 3


def test_a_piece_alone_has_a_node_that_is_for_it(cluster):
    """The second node alone has the resource: of its CPU, and of the resource, nothing is left for others meanwhile."""
    with RayCluster(cluster).pool() as pool:
        assert pool.lonely == 1
        for ticket in ("first", "second"):
            pool.submit(ticket, pieces.node, None, alone=True)
        found = [pool.next() for _ in range(2)]
        assert pool.next() is None
    assert {ticket for ticket, _ in found} == {"first", "second"}
    (place,) = {tuple(sorted(node.items())) for _, node in found}
    assert dict(place) == {"CPU": 1.0, DEVICE: 1.0}


def test_a_piece_alone_that_always_dies_is_named(cluster, tmp_path):
    with RayCluster(cluster).pool() as pool:
        pool.submit(0, pieces.dies, (str(tmp_path), 99), "mine-int8", alone=True)
        ticket, error = pool.next()
    assert ticket == 0 and isinstance(error, WorkerError) and error.message == "mine-int8 died 3 times"


def test_what_has_not_begun_can_be_dropped(executor):
    with executor.pool() as pool:
        for number in range(20):
            pool.submit(number, pieces.squared, number)
        first, value = pool.next()
        dropped = pool.drop()
        rest = []
        while (found := pool.next()) is not None:
            rest.append(found)
    assert value == first * first and len(dropped) >= 10
    assert sorted([first, *dropped, *(ticket for ticket, _ in rest)]) == list(range(20))


def test_a_process_that_dies_takes_no_other_piece_with_it(tmp_path):
    asked = [(str(tmp_path / name), deaths) for name, deaths in (("never", 0), ("once", 1), ("always", 99))]
    for folder, _ in asked:
        Path(folder).mkdir()
    found = dict(Processes(2).map(pieces.dies, asked))
    assert (found[0], found[1]) == (0, 1)
    assert isinstance(found[2], WorkerError) and "killed" in found[2].found


def test_a_task_has_the_environment_and_the_folder_of_the_command(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("VITDEPLOY_STORE", "the store")
    monkeypatch.chdir(tmp_path)
    assert dict(RayCluster(cluster).map(pieces.where, ["VITDEPLOY_STORE"])) == {0: ("the store", str(tmp_path))}


@pytest.mark.parametrize(("at_a_time", "seconds", "counts"), [(1, 0.2, [1, 2]), (None, 60.0, [2, 2])])
def test_so_many_at_a_time(cluster, tmp_path, at_a_time, seconds, counts):
    """Of two nodes; each piece waits for the other one."""
    pieces_of_two = [(str(tmp_path), 2, seconds)] * 2
    assert sorted(dict(RayCluster(cluster, at_a_time).map(pieces.begun, pieces_of_two)).values()) == counts


def test_a_cluster_of_this_machine_is_started_and_ended_for_a_user_who_has_no_token_yet(tmp_path):
    pytest.importorskip("ray", reason=NO_RAY)
    code = """
from tests.workflows.pieces import squared
from vitdeploy.workflows.executors import RayCluster
assert dict(RayCluster().map(squared, [2])) == {0: 4}
import ray
assert not ray.is_initialized()
"""
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment = {**own, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
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
    found = executor_of(text, at_a_time)
    assert isinstance(found, Processes) and found.count == count


@pytest.mark.parametrize("text", ["", "spark", "processes:4", "Ray"])
def test_another_name_is_refused(text):
    with pytest.raises(InputError, match="nothing runs work under this name"):
        executor_of(text, 1)


def test_another_vitdeploy_on_a_node_is_refused(cluster, monkeypatch):
    monkeypatch.setattr(ray_pool, "code_version", lambda everything: "another")
    (error,) = dict(RayCluster(cluster).map(pieces.squared, [1])).values()
    assert isinstance(error, WorkerError) and "has another vitdeploy" in error.message


@pytest.mark.parametrize("address", ["10.0.0.5:6379", "ray://gpu.example.org:10001", "[2001:db8::1]:6379"])
def test_an_address_on_the_network_is_not_asked_without_a_token(address, monkeypatch):
    pytest.importorskip("ray", reason=NO_RAY)
    monkeypatch.delenv(MODE, raising=False)
    with pytest.raises(InputError, match="would be asked without a token") as caught:
        list(RayCluster(address).map(pieces.squared, [1]))
    assert f"export {MODE}={TOKEN}" in caught.value.fix


@pytest.mark.parametrize("address", ["nowhere", "host:port", "10.0.0.5"])
def test_what_is_no_address_is_told(address):
    pytest.importorskip("ray", reason=NO_RAY)
    with pytest.raises(InputError, match="not the address of a Ray cluster"):
        list(RayCluster(address).map(pieces.squared, [1]))


def test_a_cluster_that_is_not_there_is_told_at_once():
    pytest.importorskip("ray", reason=NO_RAY)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(WorkerError, match="does not answer"):
        list(RayCluster(f"127.0.0.1:{port}").map(pieces.squared, [1]))


OTHER_TOKEN = """
import sys
from tests.conftest import NO_RAY, ROOT
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

    found = [{"NodeManagerAddress": f"10.0.0.{number}", "Alive": True} for number in (1, 2)]
    monkeypatch.delenv(ray_cluster.SHARED_VARIABLE, raising=False)
    monkeypatch.setattr(ray, "nodes", lambda: found)
    with pytest.raises(InputError, match="the cluster has 2 machines"):
        list(RayCluster(cluster).map(pieces.squared, [1]))


def test_without_ray_the_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingPackageError, match="needs the package ray") as caught:
        list(RayCluster().map(pieces.squared, [1]))
    assert "vitdeploy[ray]" in caught.value.fix
