"""A roll-out to many devices on a bad day: an OpenSSH server each, a good bundle, bad ones, and devices that lose their
power at random moments.

    python -m tests.devices.fleet_of_many [--devices 50] [--cuts 8]

Prints what each part took, and exits with 1 where a device has anything but the old or the new release, whole.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.devices.shop import Shop, releases_of, shop_of
from tests.faults.devices.model import make_small
from vitdeploy.api.values import Reporter
from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.bundle.read import file_sha256
from vitdeploy.devices import client
from vitdeploy.devices.api import roll_out, standing
from vitdeploy.devices.call import DevicePatience
from vitdeploy.devices.command import DeployOptions
from vitdeploy.devices.rollout import RollOut

SEED = 22
MOST_COMMANDS = 6
# Of measurements that are over at once, of devices that are one machine: only what is far slower is said to be slower.
HOW: dict[str, Any] = {"duration": 0.02, "worse": 100.0, "stages": "1,10%,all"}
QUIET = Reporter(quiet=True)
# Devices that are off are waited for in seconds here; one waits for the measurements of all others.
PATIENCE = DevicePatience(lost=2.0, first_retry=0.2, queue=6 * 3600.0, answer=1200.0, greeting=600.0, silence=600.0)


@contextmanager
def on_a_bad_day(folder: Path, devices: int) -> Iterator[Shop]:
    """The devices, known here, and a short protocol."""
    with pytest.MonkeyPatch.context() as patch, shop_of(folder, devices) as shop:
        patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        patch.setattr(client, "PATIENCE", PATIENCE)
        quick = {"processes": 1, "warmup": 0.0}
        defaults = [quick.get(field.name, field.default) for field in dataclasses.fields(Protocol)]
        patch.setattr(Protocol.__init__, "__defaults__", tuple(defaults))
        shop.register()
        yield shop


class Day:
    """What happens, one after the other; each part says what it took, or what is wrong."""

    def __init__(self, shop: Shop, bundles: dict[str, Path], cuts: int) -> None:
        self.shop, self.bundles, self.cuts = shop, bundles, cuts
        self.releases = {name: file_sha256(bundle / "manifest.json") for name, bundle in bundles.items()}
        self.wrong: list[str] = []

    def expect(self, what: str, holds: bool, found: object = "") -> None:
        if not holds:
            self.wrong.append(what)
            print(f"WRONG: {what}: {found}", flush=True)

    def deploy(self, name: str) -> tuple[RollOut, int]:
        began = time.monotonic()
        found = roll_out(DeployOptions(self.bundles[name], "label:shop", **HOW), QUIET)
        code = found.error.exit_code if found.error is not None else 0
        fleet, members = found.fleet, found.members
        states = dict(Counter(each.state for each in members))
        why = f": {found.error.message}" if found.error is not None else ""
        print(f"{name}: exit {code}, {fleet.progress}, {states}, {time.monotonic() - began:.0f} s{why}", flush=True)
        return found, code

    def a_good_one(self) -> None:
        _, code = self.deploy("first")
        running = self.shop.running()
        self.expect(
            "a good release reaches all", code == 0 and set(running.values()) == {self.releases["first"]}, running
        )

    def bad_ones(self) -> None:
        before = {name: (self.shop.runs(name), self.shop.place(name).look()) for name in self.shop.names}
        for name in ("wrong", "slow"):
            found, code = self.deploy(name)
            after = {name: (self.shop.runs(name), self.shop.place(name).look()) for name in self.shop.names}
            failed = [each.device for each in found.members if each.state == "failed"]
            self.expect(f"{name}: it stops at the first device", code == 5 and failed == self.shop.names[:1], failed)
            self.expect(f"{name}: all others are as they were", after == before)
            others = [path for each in self.shop.names[1:] for path in self.shop.place(each).releases.iterdir()]
            self.expect(f"{name}: no other device got it", len(others) == len(self.shop.names) - 1)

    def power_cuts(self, seconds: float) -> None:
        """Devices lose their power while a good release is brought, some in the middle of its switch."""
        drawn = random.Random(SEED)
        struck = drawn.sample(self.shop.names, self.cuts)
        whole = {self.releases["first"], self.releases["second"]}
        timers = [threading.Timer(drawn.uniform(1, seconds), self.shop.switch_off, (name,)) for name in struck]
        for timer in timers:
            timer.start()
        _, code = self.deploy("second")
        for timer in timers:
            timer.join()
        for number in range(MOST_COMMANDS):
            running = self.shop.running()
            halves = {name: release for name, release in running.items() if release not in whole}
            self.expect(
                f"each device has the old or the new release, whole, after command {number + 1}", not halves, halves
            )
            if number == 0:
                self.shop.switch_on(*struck)
            if number and code == 0:
                break
            _, code = self.deploy("second")
        running = self.shop.running()
        self.expect("the same command brings it to all", set(running.values()) == {self.releases["second"]}, running)
        counters = {each.counter for fleet in standing("small", None, QUIET).fleets for each in fleet.members}
        print(f"moves of the link on each device: {sorted(counters)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=50)
    parser.add_argument("--cuts", type=int, default=8)
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        first = make_small(folder).bundle
        with on_a_bad_day(folder / "shop", options.devices) as shop:
            print(
                f"{options.devices} devices, {os.cpu_count()} CPUs, {time.monotonic() - began:.0f} s to begin",
                flush=True,
            )
            day = Day(shop, releases_of(first, folder), options.cuts)
            good = time.monotonic()
            day.a_good_one()
            good = time.monotonic() - good
            day.bad_ones()
            day.power_cuts(good)
    print(f"{'all right' if not day.wrong else f'{len(day.wrong)} things are wrong'}, {time.monotonic() - began:.0f} s")
    return bool(day.wrong)


if __name__ == "__main__":
    sys.exit(main())
