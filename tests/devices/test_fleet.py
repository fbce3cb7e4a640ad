"""A bundle brought to several devices, over real ssh: where it is good all have it, where it is bad none keeps it."""

import dataclasses
import json
import shutil

import pytest

from tests.command_line import command_line
from tests.conftest import IN_SCALE
from tests.devices.shop import die_in_a_move, releases_of, shop_of
from tests.golden_bundle import golden_small_bundle
from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.bundle.read import file_sha256
from vitdeploy.devices import client
from vitdeploy.devices.call import DevicePatience

QUICK = ("--duration", "0.03", "--worse", "100")


@pytest.fixture(scope="module")
def bundles(tmp_path_factory, small_bundle):
    return releases_of(golden_small_bundle(small_bundle, tmp_path_factory), tmp_path_factory.mktemp("bundles"))


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    with shop_of(tmp_path_factory.mktemp("shop"), 3) as shop:
        yield shop


@pytest.fixture
def here(shop, shared_store, tmp_path, monkeypatch):
    """The command line in this process, whose user has named the devices of a shop with nothing deployed."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(client, "PATIENCE", DevicePatience(lost=1, first_retry=0.1))
    quick = {"processes": 1, "warmup": 0.0}  # one process of each is enough here
    defaults = [quick.get(field.name, field.default) for field in dataclasses.fields(Protocol)]
    monkeypatch.setattr(Protocol.__init__, "__defaults__", tuple(defaults))
    shop.register()
    with command_line(tmp_path, shared_store) as here:
        yield here


def release_of(bundle):
    return file_sha256(bundle / "manifest.json")


@IN_SCALE
def test_a_fleet_from_its_first_release_to_its_way_back(here, shop, bundles):
    first, second = release_of(bundles["first"]), release_of(bundles["second"])
    one, two, three = shop.names

    def deploy(name, *options):
        done = here("devices", "deploy", bundles[name], "--on", "label:shop", *QUICK, *options, "--json")
        return done.returncode, json.loads(done.stdout), done.stderr

    # Two of three are on; the same command serves the third once it is.
    shop.switch_off(three)
    code, document, said = deploy("first", "--canary", "1,all")
    assert (code, document["progress"]) == (4, "partial"), said
    assert "VD4301" in said and f"{three} (ssh://board) cannot be reached" in said
    assert [each.partition(":")[0] for each in document["stages"]] == ["stage 1", "stage all"]
    assert shop.running() == {one: first, two: first, three: ""}
    assert [each["state"] for each in document["members"]] == ["current", "current", "off"]
    shop.switch_on(three)
    code, document, said = deploy("first", "--canary", "1,all")
    assert (code, document["progress"], document["stages"]) == (0, "complete", [f"stage all: {three}"]), said
    assert shop.running() == dict.fromkeys(shop.names, first)
    assert {each["counter"] for each in document["members"]} == {1}
    assert all(each["p99_ms"] > 0 and each["ratio"] is None for each in document["members"])

    # Wrong answers, and slow ones, end at the first device; nothing is moved there or elsewhere.
    links = {name: shop.place(name).link.lstat() for name in shop.names}
    for name, why in (("wrong", "its answers are wrong"), ("slow", "it is slower")):
        code, document, said = deploy(name, "--canary", "1,10%,all")
        assert (code, document["progress"], document["stages"]) == (5, "stopped", []), said
        assert f"VD5001  small failed on {one}: {why}" in said and document["errors"][0]["code"] == "VD5001"
        assert [each["state"] for each in document["members"]] == ["failed", "behind", "behind"]
        assert [sorted(path.name for path in shop.place(each).releases.iterdir()) for each in (two, three)] == [
            [first]
        ] * 2
    assert shop.running() == dict.fromkeys(shop.names, first)
    assert {name: shop.place(name).link.lstat() for name in shop.names} == links

    # A stage of one, and back.
    code, document, said = deploy("second", "--canary", "1")
    assert (code, document["progress"]) == (0, "complete"), said
    assert shop.running() == {one: second, two: first, three: first}
    assert document["members"][0]["ratio"] > 0 and document["members"][0]["previous"] == first
    assert len(list(shop.place(one).releases.iterdir())) == 2
    table = here("devices", "status", "small").stdout
    assert [row.split()[1:3] for row in table.splitlines()[2:5]] == [
        [second[:12], "current"],
        *[[first[:12], "behind"]] * 2,
    ]
    done = here("devices", "rollback", "small", "--on", f"{one},{two}", "--json")
    assert done.returncode == 4 and f"{two} has no previous release of small" in done.stderr
    assert shop.running() == dict.fromkeys(shop.names, first)
    assert not any(board.jobs for board in shop.boards.values())


def test_a_device_that_loses_its_power_keeps_a_whole_release(here, shop, bundles):
    """While the link is at a release that nobody has found good yet: the next command takes it back first."""
    name = shop.names[0]
    before = shop.runs(name)
    die_in_a_move(shop.place(name), bundles["second"])
    assert shop.runs(name) == release_of(bundles["second"])
    document = here("devices", "status", "--on", name, "--json").document
    [member] = document["deployments"][0]["members"]
    assert (member["release"], shop.runs(name)) == (before, before)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--on", "label:nobody"), 2, "no device has the label 'nobody'"),
        (("--on", "shop", "--canary", "1,none"), 2, "'none' is not a stage"),
        (("--on", "shop", "--canary", "0"), 2, "'0' is not a stage"),
        (("--on", "shop", "--canary", "101%"), 2, "'101%' is not a stage"),
        (("--on", "shop", "--name", "../up"), 2, "'../up' is not a valid deployment name"),
        (("--on", "shop", "--target", "tensorrt"), 2, "has no engine for tensorrt"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_any_device_is_asked(here, bundles, options, code, message):
    done = here("devices", "deploy", bundles["first"], *options)
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr


def test_a_bundle_without_golden_answers_is_not_deployed(here, small_bundle):
    done = here("devices", "deploy", small_bundle, "--on", "shop")
    assert done.returncode == 2 and "has no golden answers" in done.stderr


def test_a_bundle_that_changed_is_not_deployed(here, bundles, tmp_path):
    shutil.copytree(bundles["first"], tmp_path / "changed")
    (tmp_path / "changed" / "model.onnx").write_bytes(b"changed")
    done = here("devices", "deploy", tmp_path / "changed", "--on", "shop")
    assert done.returncode == 3 and "VD3101" in done.stderr
