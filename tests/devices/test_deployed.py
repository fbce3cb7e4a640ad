"""What a device says of a release is judged here, by bounds that are known here; what contradicts itself is refused."""

import copy
from dataclasses import replace

import pytest

from tests.faults.devices.documents import _bench_run
from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.bundle.read import read_bundle
from vitdeploy.devices.agent.documents import (
    FORMAT,
    Deployed,
    DeviceJob,
    GoldenResult,
    JobResult,
    ReleaseOptions,
    Tried,
)
from vitdeploy.devices.results import check_deployments, check_missing, judge
from vitdeploy.devices.rollout import parse_stages
from vitdeploy.errors import DeviceResultError, InputError, StorageError
from vitdeploy.spec import GoldenEngine, GoldenSpec

PROTOCOL = Protocol(("single",), (1,), 0.06, 0.02, 3, 0.0, processes=1, max_extension=1)
OLD, NEW = "a" * 64, "b" * 64
RELEASE = ReleaseOptions("small", NEW, OLD, 3, "auto", 0.1)
STAGE = DeviceJob(FORMAT, "stage", "a" * 64, "me@here", (), (), PROTOCOL, release=RELEASE)
SWITCH = replace(STAGE, kind="switch")
RIGHT = GoldenResult(5, 1e-6, 1e-3, 5, 5)


@pytest.fixture(scope="module")
def manifest(small_bundle):
    """Of a bundle with golden answers, which nothing here reads."""
    found = read_bundle(small_bundle)
    [engine] = found.engines
    golden = GoldenSpec("in.npz", "out.npz", engines={engine.artifact: GoldenEngine("own.npz", 1e-3, 5)})
    return replace(found, golden=golden)


def measured(*names, slower=1.0):
    run = _bench_run("x", PROTOCOL)
    [entry] = run["entries"]
    run["entries"] = [{**copy.deepcopy(entry), "artifact": name} for name in names]
    run["context"] = None
    for block in run["entries"][0]["rounds"]["single"]:
        block["latencies_ms"] = [slower * each for each in block["latencies_ms"]]
        block["seconds"] *= slower
    return run


def result(manifest, bench_run, golden=RIGHT, **tried):
    return JobResult(
        FORMAT, "0" * 64, {}, bench_run=bench_run, tried=Tried(manifest.engines[0].artifact, golden, **tried)
    )


def judged(manifest, found, job=STAGE):
    return judge("till", found, job, manifest)


def test_a_release_that_is_right_and_as_fast_may_stay(manifest):
    run = measured("new", "current")
    staged = judged(manifest, result(manifest, run))
    switched = judged(manifest, result(manifest, run, kept=True), SWITCH)
    assert (staged.failed, switched.failed, staged.tail.ratio) == ("", "", 1.0) and staged.p99_ms == 2.0


def test_one_that_is_slower_or_wrong_may_not_and_a_first_one_is_only_measured(manifest):
    slower = judged(manifest, result(manifest, measured("new", "current", slower=9.0)))
    assert "p99 is 9.00 times that of the current release" in slower.failed
    wrong = judged(manifest, result(manifest, None, replace(RIGHT, difference=None, same=1)))
    assert "1 of 5 equal the original's" in wrong.failed and "the recorded outputs: NaN" in wrong.failed
    alone = judged(manifest, result(manifest, measured("new"), alone="no previous release"))
    assert (alone.failed, alone.tail, alone.p99_ms) == ("", None, 2.0)
    back = judged(manifest, result(manifest, measured("new", "current")), SWITCH)
    assert back.failed == "the device reverted it"


@pytest.mark.parametrize(
    ("changes", "job", "message"),
    [
        ({"engine": "another"}, STAGE, "an engine that the release does not have"),
        ({"golden": replace(RIGHT, tolerance=1.0)}, STAGE, "bounds that differ from the bundle's"),
        ({"golden": replace(RIGHT, least_same=0)}, STAGE, "bounds that differ from the bundle's"),
        ({"golden": replace(RIGHT, same=6)}, STAGE, "implausible golden answers"),
        ({"golden": replace(RIGHT, inputs=0, same=0)}, STAGE, "implausible golden answers"),
        ({"golden": replace(RIGHT, difference=-1.0)}, STAGE, "implausible golden answers"),
        ({"golden": replace(RIGHT, same=4)}, STAGE, "measurements that were not requested"),
        ({"kept": True}, STAGE, "the device keeps a rejected release"),
        ({"alone": "no previous release"}, STAGE, "measurements of other artifacts"),
        (
            {},
            replace(SWITCH, release=replace(RELEASE, expected="")),
            "a comparison with a release that the device does not have",
        ),
        ({}, replace(SWITCH, protocol=None), "measurements that were not requested"),
    ],
)
def test_what_contradicts_itself_or_what_was_asked_is_refused(manifest, changes, job, message):
    found = result(manifest, measured("new", "current"))
    with pytest.raises(DeviceResultError, match=message):
        judged(manifest, replace(found, tried=replace(found.tried, **changes)), job)


def test_a_device_cannot_keep_what_its_own_numbers_speak_against(manifest):
    with pytest.raises(DeviceResultError, match="the device keeps a rejected release"):
        judged(manifest, result(manifest, measured("new", "current", slower=9.0), kept=True), SWITCH)


@pytest.mark.parametrize(
    ("deployed", "message"),
    [
        ((Deployed("../x"),), "invalid deployment names"),
        ((Deployed("x"), Deployed("x")), "invalid deployment names"),
        ((Deployed("x", "../../etc"),), "a release that is not a SHA-256"),
        ((Deployed("x", OLD, "b"),), "a release that is not a SHA-256"),
        ((Deployed("x", OLD, moving="\x1b"),), "a release that is not a SHA-256"),
    ],
)
def test_no_device_names_a_folder(deployed, message):
    assert check_deployments("till", [Deployed("x", OLD, NEW, 3)]) == {"x": Deployed("x", OLD, NEW, 3)}
    with pytest.raises(DeviceResultError, match=message):
        check_deployments("till", deployed)


def test_no_device_asks_for_other_files():
    assert check_missing("till", ("a",), ["a", "b"]) == {"a"}
    with pytest.raises(DeviceResultError, match="unknown missing files"):
        check_missing("till", ("a", "/etc/passwd"), ["a", "b"])


def test_stages_are_numbers_of_devices_whatever_they_are_said_in():
    counts = [[step.count(every) for step in parse_stages("1,10%,2.5%, all")] for every in (1, 5, 50, 1000)]
    assert counts == [[1, 1, 1, 1], [1, 1, 1, 5], [1, 5, 2, 50], [1, 100, 25, 1000]]
    for text in ("", "1,", "0", "0%", "-1", "100.5%", "half", "1e3"):
        with pytest.raises(InputError, match="is not a stage"):
            parse_stages(text)


def test_what_is_known_here_survives_and_a_broken_file_is_told(tmp_path, monkeypatch):
    from vitdeploy.devices.registry import Fleet, FleetMember, fleet_folder, read_fleet, read_fleets, write_fleet

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert read_fleets() == {} and read_fleet("small") == Fleet("small")
    fleet = Fleet("small", NEW, "small", members=(FleetMember("till", "failed", OLD, reason="slow", p99_ms=1.5),))
    write_fleet(fleet)
    assert read_fleets() == {"small": fleet} and fleet.member("other") == FleetMember("other")
    assert (fleet_folder() / "small.json").stat().st_mode & 0o777 == 0o600
    (fleet_folder() / "small.json").write_text("{")
    with pytest.raises(StorageError, match=r"small.json cannot be read"):
        read_fleets()
    (fleet_folder() / "small.json").rename(fleet_folder() / "other.json")
    write_fleet(fleet)
    (fleet_folder() / "small.json").replace(fleet_folder() / "other.json")
    with pytest.raises(StorageError, match="has a different format or name"):
        read_fleets()
