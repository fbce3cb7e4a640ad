"""Rows: evaluation in shards."""

from __future__ import annotations

from pathlib import Path

from tests.scale.commands import Commands, Done, kept_kinds, kill, many_images, small_model
from tests.scale.row import Row
from vitdeploy.data.shards import WINDOW

SHARD_KINDS = ("shard-answers", "shard-tally")
# Fewer images and more of them; and what of memory an image more may take, as its name and digest are kept.
SHORT, ALL = (4_000, 16_000), (10_000, 100_000)
KB_AN_IMAGE, NOISE_MB = 1.5, 25.0
KILLED_AT = 0.6


def constant_memory(full: bool, work: Path, row: Row) -> None:
    """The same evaluation of few images and of many; of many again, killed at 60 %, resumed, and repeated."""
    few, many = ALL if full else SHORT
    model = small_model(work.parent / "made")
    images = work / "images"
    small = _commands(work / "few")(*model.verify(many_images(images, few)))
    whole = _commands(work / "many")(*model.verify(many_images(images, many)))
    row.check(small.document()["n"] == few and whole.document()["n"] == many, "all images are evaluated")
    grown, most = whole.peak_mb - small.peak_mb, KB_AN_IMAGE * (many - few) / 1e3 + NOISE_MB
    row.check(grown <= most, f"{many:,} images take at most {most:.0f} MB more than {few:,}", f"{grown:.0f} MB more")
    row.seen["peak memory"] = f"{small.peak_mb:,.0f} MB for {few:,} images, {whole.peak_mb:,.0f} MB for {many:,}"

    again = _commands(work / "killed")
    wanted = 2 * many / (2 * WINDOW + 1)
    killed = again(
        *model.verify(images),
        while_it_runs=lambda process: kill(process) if _shards(again.store) >= KILLED_AT * wanted else None,
    )
    left = _shards(again.store)
    row.check(killed.status == -9, f"killed at {100 * KILLED_AT:.0f} %", f"exit status {killed.status}")
    resumed = again(*model.verify(images))
    made = _shards(again.store)
    row.check(left < made == _shards(work / "many" / "store"), "resumed: shards that were there are kept", f"{left}")
    _same(row, resumed, whole, "resumed: the same bytes of metrics")

    second = again(*model.verify(images))
    _same(row, second, whole, "the second run: the same bytes of metrics")
    row.check(_shards(again.store) == made, "the second run evaluates nothing")
    share = 100 * second.seconds / whole.seconds
    row.seen["second run"] = f"{share:.1f} % of {whole.seconds:.0f} s"
    row.check(not full or share < 10, "the second run takes a small part of the first one's time", f"{share:.1f} %")


def _commands(home: Path) -> Commands:
    home.mkdir(parents=True)
    return Commands(home)


def _shards(store: Path) -> int:
    return kept_kinds(store, *SHARD_KINDS)


def _same(row: Row, found: Done, wanted: Done, what: str) -> None:
    """That two commands printed the same document, to the last byte."""
    wanted.document()
    row.check(found.out == wanted.out, what, f"exit status {found.status}, {found.err[-500:]}")
