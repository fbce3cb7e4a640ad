"""The steps of variants side by side: the command alone measures, and an error is that of its variant."""

import json
import os
import time

import pytest

from tests.pipeline.small_plans import FILE, Small
from vitdeploy.errors import CapabilityError, DataError, GraphError, WorkerError
from vitdeploy.pipeline.run import run_plan
from vitdeploy.pipeline.schedule import PlanProgress, Scheduler, pooled
from vitdeploy.progress import silent
from vitdeploy.stages.workers import Workers
from vitdeploy.store.store import Store, read_log
from vitdeploy.workflows.executors import Processes
from vitdeploy.workflows.variants import Variant, why_not

pytestmark = pytest.mark.usefixtures("forked_workers")


class Search:
    """What a search gives to the scheduler, for small plans in two processes."""

    def __init__(self, home, *, resume=True):
        self.store, self.fresh, self.resume, self.finished = Store(home / "store"), set(), resume, []

    def make(self, smalls, late=None):
        """The owners that are there or failed, and their errors."""
        with pooled(Workers(Processes(2))) as (workers, pool):
            scheduler = Scheduler(
                pool,
                self.store,
                silent,
                "make",
                lambda text: None,
                resume=self.resume,
                fresh=self.fresh,
                finished=lambda step, reused: self.finished.append((step.name, reused)),
                fatal=lambda owner, error: why_not(owner, error) is None,
            )
            plans = [PlanProgress(each.name, each, each.name, each.plan(workers)) for each in smalls]
            return scheduler.run(plans, late), scheduler.errors

    def said(self):
        """What each step has written, by its name."""
        found = {}
        for line in read_log(self.store.root):
            assert line.made.name not in found, "made twice"
            found[line.made.name] = json.loads((self.store.folder(line.key) / FILE).read_text())
        return found


def smalls(home, **faults):
    return [Small(home / "store", name, fault) for name, fault in faults.items()]


def test_what_measures_and_what_gives_pieces_away_is_made_here_and_the_rest_by_workers(tmp_path):
    search = Search(tmp_path)
    there, errors = search.make(smalls(tmp_path, a="", b=""))
    assert there == {"a", "b"} and errors == {}
    said, here = search.said(), os.getpid()
    assert set(said) == {"first", "pieces", *(f"{kind} {name}" for kind in ("made", "times", "last") for name in "ab")}
    assert {name for name, each in said.items() if each["pid"] == here} == {"pieces", "times a", "times b"}
    assert len(said["pieces"]["pieces"]) == 3 and here not in said["pieces"]["pieces"]
    # No worker has begun anything between what was made before the times and the last of them.
    before, times = [said[f"made {name}"]["began"] for name in "ab"], [said[f"times {name}"]["began"] for name in "ab"]
    assert max(before) < min(times) and max(times) < min(said[f"last {name}"]["began"] for name in "ab")
    # The steps are those that the plan has in one process: nothing is left to be made.
    for each in smalls(tmp_path, a="", b=""):
        run_plan(each.plan(), search.store, resume=True, progress=silent, finished=lambda _, reused: reused or 1 / 0)


def test_a_worker_that_is_killed_changes_nothing(tmp_path):
    search = Search(tmp_path)
    there, errors = search.make(smalls(tmp_path, a="dies once", b=""))
    assert there == {"a", "b"} and errors == {} and (tmp_path / "died").exists()
    assert len(search.said()) == 8


def test_what_fails_is_named_and_the_rest_goes_on(tmp_path):
    search = Search(tmp_path)
    there, errors = search.make(smalls(tmp_path, a="always dies", b="cannot", c=""))
    assert there == {"a", "b", "c"} and set(errors) == {"a", "b"}
    assert isinstance(errors["a"], WorkerError) and errors["a"].message == "a: made a died 3 times"
    assert isinstance(errors["b"], CapabilityError)
    assert {"last c"} == {name for name in search.said() if name.startswith("last")}


def test_an_error_that_ends_the_search_ends_it_early(tmp_path):
    search = Search(tmp_path)
    there, errors = search.make(smalls(tmp_path, a="wrong", b=""))
    assert isinstance(errors["a"], DataError) and there == {"a"}
    assert not any(name.startswith("times") for name in search.said())


def test_nothing_is_begun_when_it_is_late(tmp_path):
    search = Search(tmp_path)
    assert search.make(smalls(tmp_path, a=""), lambda: True) == (set(), {})
    began = time.monotonic()
    there, _ = search.make(smalls(tmp_path, a="", b=""), lambda: len(search.said()) >= 2 and time.monotonic() > began)
    assert there == set() and set(search.said()) == {"first", "pieces"}


@pytest.mark.parametrize("resume", [True, False])
def test_what_earlier_searches_have_made_is_reused_if_that_is_wanted(tmp_path, resume):
    Search(tmp_path).make(smalls(tmp_path, a=""))
    again = Search(tmp_path, resume=resume)
    assert again.make(smalls(tmp_path, a=""))[0] == {"a"}
    made = [(name, False) for name in ("first", "pieces", "made a", "times a", "last a")]
    assert again.finished == ([] if resume else made)
    assert len(list(read_log(again.store.root))) == (5 if resume else 10)


@pytest.mark.parametrize(
    ("error", "why", "of_int4", "of_pruning"),
    [
        (CapabilityError("no AVX", found="SSE"), "no AVX", "no AVX", "no AVX"),
        (WorkerError("it died 3 times", found="killed"), *["it died 3 times: killed"] * 3),
        (GraphError("nothing to do"), None, "nothing to do", "nothing to do"),
        (DataError("an image is broken"), None, None, None),
    ],
)
def test_which_errors_leave_something_out_and_which_end_the_search(error, why, of_int4, of_pruning):
    owners = Variant("openvino-cpu", "int8"), Variant("openvino-cpu", "int4"), "pruning"
    assert [why_not(owner, error) for owner in owners] == [why, of_int4, of_pruning]
