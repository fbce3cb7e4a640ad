"""The stages of a roll-out, with devices that are values: whatever fails where, who has what afterwards."""

import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitdeploy.api.values import Reporter
from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.devices import rollout
from vitdeploy.devices import rollout as standing
from vitdeploy.devices.agent.documents import Deployed, GoldenResult
from vitdeploy.devices.call import ConnectionLost
from vitdeploy.devices.client import Client
from vitdeploy.devices.on_devices import DeviceOutcome
from vitdeploy.devices.registry import Device, read_fleet
from vitdeploy.devices.results import ReleaseTrial
from vitdeploy.devices.rollout import Release
from vitdeploy.errors import DeviceError, GateError, StorageError
from vitdeploy.spec import MANIFEST_FORMAT, Manifest

QUIET = Reporter(quiet=True)
OLD, NEW = "a" * 64, "b" * 64
MANIFEST = Manifest(MANIFEST_FORMAT, "small", "sequence", {}, None, None, (), None, ())
RELEASE = Release("small", NEW, MANIFEST, {}, "auto", Protocol(), 0.1)
RIGHT = ReleaseTrial("engine", GoldenResult(5, 0.0, 1e-3, 5, 5), 1.0)
WRONG = replace(RIGHT, golden=GoldenResult(5, 0.0, 1e-3, 0, 5), failed="golden answers: 0 of 5")


@dataclass
class Till:
    """A device: what it runs, and what goes wrong on it: it is off, or its disk is full; the release fails beside the
    current one, or through the link; its connection is lost then."""

    name: str
    fails: str = ""
    deployed: Deployed = field(default_factory=lambda: Deployed("small", OLD, "", 1))

    def does(self, kind, options):
        assert (options.expected, options.counter) == (self.deployed.current, self.deployed.counter)
        if kind == "stage":
            if self.fails == "full":
                raise StorageError("no space left")
            return WRONG if self.fails == "beside" else RIGHT
        if options.release == NEW and self.fails == "lost":
            raise ConnectionLost("the connection broke")
        if options.release == NEW and self.fails == "through":
            return WRONG
        self.deployed = Deployed("small", options.release, self.deployed.current, self.deployed.counter + 1)
        return RIGHT


@pytest.fixture
def deploy(tmp_path, monkeypatch):
    return deploying(tmp_path, monkeypatch)


def deploying(folder, monkeypatch):
    """What rolls out to tills, and gives what came of it."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    tills = {}

    def ask_all(devices, reporter):
        off = ConnectionLost("it cannot be reached")
        found = {name: DeviceOutcome(Device(name), {"small": till.deployed}) for name, till in tills.items()}
        return [
            DeviceOutcome(each, error=off) if tills[each.name].fails == "off" else found[each.name] for each in devices
        ]

    monkeypatch.setattr(rollout, "ask_all", ask_all)
    monkeypatch.setattr(standing, "ask_all", ask_all)
    monkeypatch.setattr(
        rollout, "_job", lambda client, kind, options, *_: tills[client.device.name].does(kind, options)
    )
    monkeypatch.setattr(Client, "ask", lambda self, kind, *arguments, send=(): ())  # nothing has to be sent

    def run(*given, stages="1,10%,all"):
        tills.clear()
        tills.update({till.name: till for till in given})
        devices = [Device(name) for name in tills]
        return rollout.roll_out(RELEASE, devices, rollout.parse_stages(stages), QUIET)

    return run


def tills(count, **fails):
    return [Till(f"till-{number:02d}", fails.get(f"till_{number:02d}", "")) for number in range(count)]


def having(release, given):
    return [till.name for till in given if till.deployed.current == release]


def states(found):
    return {member.device: member.state for member in found.members}


def test_fifty_devices_in_three_stages(deploy):
    shop = tills(50)
    found = deploy(*shop)
    assert having(NEW, shop) == [till.name for till in shop] and found.error is None
    assert [len(stage.split(", ")) for stage in found.stages] == [1, 4, 45]
    assert found.fleet.progress == "complete" and set(states(found).values()) == {"current"}
    again = deploy(*shop)
    assert again.stages == () and {till.deployed.counter for till in shop} == {2}


@pytest.mark.parametrize("how", ["beside", "through"])
def test_a_bad_one_stops_at_the_first(deploy, how):
    shop = tills(50, till_00=how)
    found = deploy(*shop)
    assert having(NEW, shop) == [] and {till.deployed.counter for till in shop} == {1}
    assert isinstance(found.error, GateError)
    assert "small failed on till-00: its answers are wrong" in found.error.message
    assert [name for name, state in states(found).items() if state != "behind"] == ["till-00"]
    assert read_fleet("small").progress == "stopped" and read_fleet("small").member("till-00").state == "failed"


def test_a_stage_that_fails_on_one_is_taken_back_and_those_before_are_not(deploy):
    shop = tills(50, till_03="through")
    found = deploy(*shop)
    assert having(NEW, shop) == ["till-00"]
    assert [till.deployed.counter for till in shop[:6]] == [2, 3, 3, 1, 3, 1]
    assert found.fleet.member("till-01").reason == "its stage was reverted" and found.error.exit_code == 5


def test_one_of_many_that_is_lost_while_it_switches_is_served_later(deploy):
    shop = tills(5, till_02="lost")
    found = deploy(*shop, stages="1,all")
    assert having(NEW, shop) == ["till-00", "till-01", "till-03", "till-04"]
    assert states(found)["till-02"] == "off" and (found.fleet.progress, found.error.exit_code) == ("partial", 4)


@pytest.mark.parametrize("lost", [("till_00",), ("till_01", "till_02", "till_03")])
def test_a_release_that_most_of_a_stage_is_lost_with_stops_there(deploy, lost):
    shop = tills(6, **dict.fromkeys(lost, "lost"))
    found = deploy(*shop, stages="1,all")
    assert having(NEW, shop) == (["till-00"] if "till_00" not in lost else [])
    assert isinstance(found.error, ConnectionLost) and found.fleet.progress == "stopped"
    assert {name for name, state in states(found).items() if state == "failed"} == {n.replace("_", "-") for n in lost}


def test_those_that_are_off_or_full_are_replaced_in_their_stage_and_served_later(deploy):
    shop = tills(6, till_00="off", till_01="full")
    found = deploy(*shop, stages="1,50%,all")
    assert having(NEW, shop) == ["till-02", "till-03", "till-04", "till-05"] and found.fleet.progress == "partial"
    assert [stage.count(",") + 1 for stage in found.stages] == [1, 2, 1]
    assert found.error.exit_code == 4 and len(found.errors) == 2
    for till in shop:
        till.fails = ""
    found = deploy(*shop, stages="1,50%,all")
    assert having(NEW, shop) == [till.name for till in shop] and len(found.stages) == 1
    assert {till.deployed.counter for till in shop} == {2}


def test_the_way_back(deploy):
    shop = tills(3)
    deploy(*shop)
    shop[1].deployed = Deployed("small", NEW, "", 2)
    found = standing.roll_back("small", [Device(till.name) for till in shop], "auto", QUIET)
    assert having(OLD, shop) == ["till-00", "till-02"]
    assert isinstance(found.error, DeviceError)
    assert "till-01 has no previous release of small" in found.error.message
    assert states(found) == {"till-00": "behind", "till-01": "current", "till-02": "behind"}


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from(["", "", "", "off", "full", "beside", "through", "lost"]), min_size=1, max_size=12),
    st.sampled_from(["1,all", "1,10%,all", "all", "2,50%", "50%,25%,all"]),
)
def test_whatever_fails_nobody_keeps_what_failed_and_nobody_is_served_after_it(fails, stages):
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        deploy = deploying(Path(folder), patch)
        shop = [Till(f"till-{number:02d}", how) for number, how in enumerate(fails)]
        found = deploy(*shop, stages=stages)
        having_new = having(NEW, shop)
        assert all(till.fails == "" for till in shop if till.name in having_new)
        failed = [till for till in shop if states(found)[till.name] == "failed"]
        assert all(till.fails in ("beside", "through", "lost") for till in failed)
        assert (found.fleet.progress == "stopped") == bool(failed)
        served = {name for stage in found.stages for name in stage.partition(": ")[2].split(", ")}
        assert served == set(having_new)  # what a stage that failed had switched is back
        for till in shop:
            assert till.deployed.current in (OLD, NEW)
            state = {True: "current"}.get(till.deployed.current == NEW)
            assert state is None or states(found)[till.name] == state
        assert (found.error is None) == (found.fleet.progress == "complete")
