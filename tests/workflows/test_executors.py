"""Pieces of work in processes of this machine, and on a real Ray cluster of two nodes: the same results and errors."""

import pytest

from tests.workflows import pieces
from vitdeploy.errors import DataError, WorkerError
from vitdeploy.workflows import executors
from vitdeploy.workflows.executors import DEVICE, Processes, RayCluster, _RayPool


@pytest.fixture(scope="module")
def processes():
    with Processes(2).pool() as pool:
        yield pool


@pytest.fixture(scope="module")
def nodes(cluster):
    """One connection for all tests of this file: each makes Ray start processes of its own."""
    with RayCluster(cluster).pool() as pool:
        yield pool


@pytest.fixture(params=["processes", "nodes"])
def executor(request):
    return request.getfixturevalue(request.param)


def test_every_piece_has_its_result_or_its_error(executor):
    results = dict(executor.map(pieces.squared, [3, -1, 0, 5]))
    error = results.pop(1)
    assert results == {0: 9, 2: 0, 3: 25}
    assert isinstance(error, DataError) and (error.found, error.expected) == ("-1", "0 or more")


def test_without_pieces_there_is_nothing(executor):
    assert list(executor.map(pieces.squared, [])) == []


def test_what_nobody_expected_is_not_hidden(executor):
    with pytest.raises(ZeroDivisionError, match="nobody expected 7"):
        list(executor.map(pieces.surprised, [7]))


def test_a_process_that_dies_is_started_again_and_takes_no_other_piece_with_it(executor, tmp_path, request):
    deaths = {"never": 0, "twice": 2, "always": 99}
    for name in deaths:
        (tmp_path / name).mkdir()
    results = dict(executor.map(pieces.dies, [(str(tmp_path / name), times) for name, times in deaths.items()]))
    assert (results[0], results[1]) == (0, 2)
    assert isinstance(results[2], WorkerError) and results[2].message == "a task died 3 times"
    assert {"processes": "was killed", "nodes": "died"}[request.node.callspec.params["executor"]] in results[2].found
    assert len(list((tmp_path / "always").iterdir())) == 3


def test_what_has_not_begun_can_be_dropped(executor):
    for number in range(20):
        executor.submit(number, pieces.squared, number)
    first, value = executor.next()
    dropped, finished = executor.drop(), []
    while (done := executor.next()) is not None:
        finished.append(done[0])
    assert value == first * first and len(dropped) >= 10
    assert sorted([first, *dropped, *finished]) == list(range(20))


# --- nodes of a cluster -----------------------------------------------------------------------------------------------


def test_a_piece_alone_has_a_node_that_is_for_it(nodes):
    """The second node alone has the resource: of its CPU, and of the resource, nothing is left for others meanwhile."""
    assert nodes.lonely == 1
    for ticket in ("first", "second"):
        nodes.submit(ticket, pieces.node, None, alone=True)
    results = dict(nodes.next() for _ in range(2))
    assert nodes.next() is None
    assert results == {ticket: {"CPU": 1.0, DEVICE: 1.0} for ticket in ("first", "second")}


def test_a_piece_alone_that_always_dies_is_named(nodes, tmp_path):
    nodes.submit(0, pieces.dies, (str(tmp_path), 99), "mine-int8", alone=True)
    ticket, error = nodes.next()
    assert ticket == 0 and isinstance(error, WorkerError) and error.message == "mine-int8 died 3 times"


def test_a_task_has_the_environment_and_the_folder_of_the_command(nodes, tmp_path, monkeypatch):
    monkeypatch.setenv("VITDEPLOY_STORE", "the store")
    monkeypatch.chdir(tmp_path)
    assert dict(nodes.map(pieces.where, ["VITDEPLOY_STORE"])) == {0: ("the store", str(tmp_path))}


@pytest.mark.usefixtures("nodes")
@pytest.mark.parametrize(("at_a_time", "seconds", "counts"), [(1, 0.2, [1, 2]), (None, 60.0, [2, 2])])
def test_so_many_at_a_time(tmp_path, at_a_time, seconds, counts):
    """Of two nodes; each piece waits for the other one."""
    import ray

    pieces_of_two = [(str(tmp_path), 2, seconds)] * 2
    assert sorted(dict(_RayPool(ray, at_a_time).map(pieces.begun, pieces_of_two)).values()) == counts


def test_another_vitdeploy_on_a_node_is_refused(nodes, monkeypatch):
    monkeypatch.setattr(executors, "code_version", lambda everything: "another")
    (error,) = dict(nodes.map(pieces.squared, [1])).values()
    assert isinstance(error, WorkerError) and "has a different version of vitdeploy" in error.message
