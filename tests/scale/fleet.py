"""Row: a bundle on many boards, each an OpenSSH server of its own on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command_line import command_line, undisturbed
from tests.devices.shop import Shop, die_in_a_move, releases_of, shop_of
from tests.golden_bundle import with_golden_answers
from tests.scale.commands import small_model
from tests.scale.row import Missing, Row
from vitdeploy.bundle.read import file_sha256

BOARDS, ALL_BOARDS = 2, 50
QUICK = ("--duration", "0.03", "--worse", "100", "--canary", "1,10%,all", "--json")


def staged(full: bool, work: Path, row: Row) -> None:
    """A good bundle reaches all boards, a bad one ends at the canary; one that dies in the switch has a whole one."""
    (work / "shop").mkdir()
    bundles = _bundles(work, small_model(work.parent / "made").graph)
    os.environ["XDG_CONFIG_HOME"] = str(work / "config")
    try:
        with undisturbed(work), shop_of(work / "shop", ALL_BOARDS if full else BOARDS) as shop:
            shop.register()
            _rolled_out(work, row, shop, bundles)
    except pytest.skip.Exception as skipped:  # of the servers
        raise Missing(str(skipped)) from skipped


def _bundles(work: Path, graph: Path) -> dict[str, Path]:
    from vitdeploy.workflows.placement import compile_bundle

    folders = {name: work / name for name in ("compiled", "engine", "golden", "bundles")}
    for folder in folders.values():
        folder.mkdir()
    compile_bundle(graph, "onnxruntime-cpu", None, None, folders["compiled"])
    first = with_golden_answers(folders["compiled"], folders["engine"], folders["golden"])
    return releases_of(first, folders["bundles"])


def _rolled_out(work: Path, row: Row, shop: Shop, bundles: dict[str, Path]) -> None:
    first, second = (file_sha256(bundles[name] / "manifest.json") for name in ("first", "second"))
    with command_line(work, work / "store") as here, _one_process():

        def deploy(name: str) -> int | str | None:
            return here("devices", "deploy", bundles[name], "--on", "label:shop", *QUICK).returncode

        row.check(deploy("first") == 0 and set(shop.running().values()) == {first}, "a good bundle reaches all")
        for name in ("wrong", "slow"):
            links = [shop.place(each).link.lstat() for each in shop.names]
            stopped = deploy(name) == 5
            kept = [shop.place(each).link.lstat() for each in shop.names] == links
            only = [len(list(shop.place(each).releases.iterdir())) for each in shop.names[1:]]
            right = stopped and kept and set(shop.running().values()) == {first} and set(only) == {1}
            row.check(right, f"a bundle that is {name} ends at the first board, and no link is moved")
        last = shop.names[-1]
        die_in_a_move(shop.place(last), bundles["second"])
        row.check(shop.runs(last) in (first, second), "a board that dies in the switch runs a whole release")
        row.check(deploy("second") == 0 and set(shop.running().values()) == {second}, "the next one reaches all again")
    row.seen["boards"] = str(len(shop.names))


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    """Each release is measured by one process, without a warm-up."""
    from vitdeploy.benchmark.protocol import Protocol

    quick = {"processes": 1, "warmup": 0.0}
    defaults = tuple(quick.get(field.name, field.default) for field in dataclasses.fields(Protocol))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Protocol.__init__, "__defaults__", defaults)
        yield
