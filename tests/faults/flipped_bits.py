"""The figure "flipped bits": one bit in a file of a bundle, of a packed bundle or of the store, as disks lose them.

Each is found, or the file is not read: it can be removed, and the answer is the same.

What finds it: every digest of a bundle by `inspect`; the manifest, which has no digest above it, by `bundle verify
--expect-digest`; a packed bundle byte by byte; an entry of the store when a run looks for it. A bundle is also loaded
without any of these, and asked: it refuses, or gives the same answer.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.faults.gate import Row, timed
from tests.faults.malformed import recipes
from tests.faults.sandbox import Sandbox, preload
from tests.faults.seeds import TARGETS, Seeds, make_apart

FULL, SHORT = 1000, 50
# So many flips a process: what one leaves in memory must not pass for the next.
AT_ONCE = 25
MANIFEST, RECORD = "manifest.json", "artifact.json"
Told = list[tuple[str, str, str]]  # name, outcome, note


def run(full: bool, work: Path) -> list[Row]:
    """`tests.faults` calls this."""
    preload(("vitdeploy.api.inspect", "vitdeploy.runtime.load"))
    seeds, count = make_apart(work), FULL if full else SHORT
    sandbox = Sandbox(work / "sandbox")
    return [
        timed(bundle_row, sandbox, seeds, work / "bundle", count),
        timed(packed_row, sandbox, seeds, work / "packed", count // 5),
        timed(store_row, sandbox, seeds, work / "stored", count),
        timed(resumed_row, sandbox, work / "stored", count // 25),
    ]


@contextlib.contextmanager
def flipped(path: Path, bit: int) -> Iterator[None]:
    """The file with one bit changed, and as it was again."""
    whole = path.read_bytes()
    data = bytearray(whole)
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(whole)


def chosen(files: Sequence[Path], count: int, name: str) -> list[tuple[Path, int]]:
    """(file, number of the bit): by turns a file by its size, and any, so that small ones are met too."""
    chance = random.Random(name)
    files = [path for path in files if path.stat().st_size]
    sizes = [path.stat().st_size for path in files]
    found = []
    for number in range(count):
        path = chance.choices(files, sizes)[0] if number % 2 else chance.choice(files)
        found.append((path, chance.randrange(8 * path.stat().st_size)))
    return found


def in_batches(
    sandbox: Sandbox, row: Row, folder: Path, flips: Sequence[Any], one: Callable[[Any], tuple[str, str, str]]
) -> None:
    """Add what `one` says of each flip, a process for every AT_ONCE of them."""
    result = sandbox.work / "result.json"
    for start in range(0, len(flips), AT_ONCE):
        batch = flips[start : start + AT_ONCE]

        def work(batch: Sequence[Any] = batch) -> None:
            result.write_text(json.dumps([one(flip) for flip in batch]), encoding="utf-8")

        result.unlink(missing_ok=True)
        started = time.monotonic()
        ended = sandbox.call(work, folder, seconds=10 * AT_ONCE)
        if ended.status or not result.is_file():
            row.add(
                f"flips {start} to {start + len(batch)}", "hang" if ended.limit else "crash", note=ended.text[-500:]
            )
            continue
        seconds = (time.monotonic() - started) / len(batch)
        for name, outcome, note in json.loads(result.read_text(encoding="utf-8")):
            row.add(name, outcome, seconds, ended.peak_mb, note)


def refusal(function: Callable[[], object]) -> tuple[str, Any]:
    """(code of a documented refusal, None), or ("", what it gave).

    Raises:
        AssertionError: anything else was raised.
    """
    from vitdeploy.errors import VitdeployError

    try:
        return "", function()
    except VitdeployError as error:
        return error.code, None
    except Exception as error:
        raise AssertionError("".join(traceback.format_exception(error))[-700:]) from None


# --- a bundle ---------------------------------------------------------------------------------------------------------


def answer_of(bundle: Path, image: Path, target: str) -> Any:
    import vitdeploy

    with vitdeploy.load(bundle, target) as predictor:
        return predictor.predict(image).to_dict()


def bundle_row(sandbox: Sandbox, seeds: Seeds, folder: Path, count: int) -> Row:
    row, bundle = Row("flipped bits: bundle", count), folder / "bundle"
    shutil.copytree(seeds.bundle, bundle)
    files = sorted(path for path in bundle.rglob("*") if path.is_file())
    facts = folder / "facts.json"
    made = sandbox.call(
        lambda: facts.write_text(json.dumps(undamaged(bundle, seeds.image_file, files))) and 0, folder, seconds=120
    )
    if made.status:
        row.add("the whole bundle", "wrong", note=made.text[-500:])
        return row
    known = json.loads(facts.read_text(encoding="utf-8"))
    flips = [(path, bit, TARGETS[i % len(TARGETS)]) for i, (path, bit) in enumerate(chosen(files, count, "bundle"))]
    in_batches(sandbox, row, folder, flips, lambda flip: _bundle_flip(bundle, seeds.image_file, known, *flip))
    others = sum("another answer" in case.note for case in row.cases)
    print(
        f"{row.figure}: {others} flips of the manifest change an answer where no digest or signature pins it",
        flush=True,
    )
    return row


def undamaged(bundle: Path, image: Path, files: Sequence[Path]) -> dict[str, Any]:
    """What is true of the whole bundle: its manifest's digest, each target's answer, and which files it does not need
    for that: without them the answer is the same."""
    from vitdeploy.bundle.read import file_sha256

    answers = {target: answer_of(bundle, image, target) for target in TARGETS}
    unread: dict[str, list[str]] = {target: [] for target in TARGETS}
    aside = bundle.parent / "aside"
    for path in files:
        for target in TARGETS:
            path.rename(aside)
            code, answer = refusal(lambda target=target: answer_of(bundle, image, target))
            aside.rename(path)
            if not code and answer == answers[target]:
                unread[target].append(str(path))
    return {"manifest": file_sha256(bundle / MANIFEST), "answers": answers, "unread": unread}


def _bundle_flip(bundle: Path, image: Path, known: Any, path: Path, bit: int, target: str) -> tuple[str, str, str]:
    from vitdeploy.api.inspect import check, inspect
    from vitdeploy.progress import silent

    name = f"{path.relative_to(bundle)}, bit {bit}, {target}"
    with flipped(path, bit):
        try:
            found = refusal(lambda: inspect(bundle))[0]
            found = found or refusal(lambda: check(bundle, known["manifest"], None, silent))[0]
            code, answer = refusal(lambda: answer_of(bundle, image, target))
        except AssertionError as error:
            return name, "crash", str(error)
    if not found:
        return name, "wrong", "neither `inspect` nor the expected digest notices it"
    if code:
        return name, "clean", f"{found}; loading it: {code}"
    same = answer == known["answers"][target]
    if path.name == MANIFEST:  # found by its expected digest, as nothing else can
        return name, "clean", f"{found}; without that, {'the same' if same else 'another answer'}"
    if not same:
        return name, "wrong", "it loads, and gives another answer"
    if str(path) not in known["unread"][target]:
        return name, "wrong", "it loads, although it needs this file"
    return name, "clean", f"{found}; not read: without the file the answer is the same"


def packed_row(sandbox: Sandbox, seeds: Seeds, folder: Path, count: int) -> Row:
    row, file = Row("flipped bits: packed bundle", count), folder / "bundle.vitb"
    folder.mkdir(parents=True)
    shutil.copyfile(seeds.packed, file)
    in_batches(sandbox, row, folder, chosen([file], count, "packed"), lambda flip: _packed_flip(*flip))
    return row


def _packed_flip(file: Path, bit: int) -> tuple[str, str, str]:
    from vitdeploy.runtime import unpack

    name, out = f"bit {bit}", file.parent / "out"
    with flipped(file, bit):
        try:
            code = refusal(lambda: unpack(file, out))[0]
        except AssertionError as error:
            return name, "crash", str(error)
    if out.exists():
        return name, "wrong", "it is unpacked"
    return name, "clean" if code else "wrong", code


# --- the store --------------------------------------------------------------------------------------------------------


def write_recipe(seeds: Seeds, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    document = {**recipes.document_of(seeds), "precision": "fp32"}
    path = folder / "recipe.yaml"
    path.write_text(recipes.yaml_of(document), encoding="utf-8")
    return path


def fill_store(recipe: Path) -> None:
    """Run all stages of a recipe but the bench, which is never stored."""
    from vitdeploy.pipeline.job import prepare
    from vitdeploy.pipeline.plan import make_plan
    from vitdeploy.pipeline.run import default_store, run_plan
    from vitdeploy.progress import silent
    from vitdeploy.recipe.load import load_recipe

    (job,) = prepare(load_recipe(recipe), skip_bad=False, progress=silent)
    run_plan(make_plan(job), default_store(), resume=True, progress=silent)


def store_row(sandbox: Sandbox, seeds: Seeds, folder: Path, count: int) -> Row:
    row, recipe, root = Row("flipped bits: store", count), write_recipe(seeds, folder), folder / "store"
    made = sandbox.call(lambda: fill_store(recipe), folder, seconds=300, megabytes=1 << 20)
    files = sorted(path for path in (root / "artifacts").rglob("*") if path.is_file())
    if made.status or not files:
        row.add("a run of all stages", "wrong", note=made.text[-500:])
        return row
    in_batches(sandbox, row, folder, chosen(files, count, "store"), lambda flip: _store_flip(root, *flip))
    return row


def _store_flip(root: Path, path: Path, bit: int) -> tuple[str, str, str]:
    from vitdeploy.store.store import Store

    relative = path.relative_to(root / "artifacts")
    key, name = relative.parts[1], f"{'/'.join(relative.parts[2:])} of {relative.parts[1][:8]}, bit {bit}"
    entry, kept = root / "artifacts" / relative.parts[0] / key, root / "kept"
    whole = Store(root).find(key)
    shutil.copytree(entry, kept)
    try:
        with flipped(path, bit):
            found = Store(root).find(key)
            unused = None
            if found == whole and path.name == RECORD:
                unused = _without_facts(entry, root, key)
            if not entry.exists():  # it is in quarantine
                shutil.copytree(kept, entry)
    finally:
        shutil.rmtree(entry, ignore_errors=True)
        kept.rename(entry)
    if found is None:
        return name, "clean", "found: the stage is made again"
    if unused is not None and unused == whole:
        return name, "clean", "in facts that nothing reads: without them the artifact is the same"
    return name, "wrong", "the artifact is taken"


def _without_facts(entry: Path, root: Path, key: str) -> Any:
    """The artifact of an entry whose record says nothing but its key and its files."""
    from vitdeploy.store.store import Store

    record = json.loads((entry / RECORD).read_text(encoding="utf-8"))
    empty: dict[str, Any] = {"kind": "", "config": {}, "inputs": {}, "tools": {}, "format": 0}
    (entry / RECORD).write_text(json.dumps({**record, **empty}), encoding="utf-8")
    return Store(root).find(key)


def resumed_row(sandbox: Sandbox, folder: Path, count: int) -> Row:
    """The same through the command: `vitdeploy run --dry-run` says which stages it would take from the store."""
    row = Row("flipped bits: resumed runs", count)
    root, pristine, command = folder / "store", folder / "pristine", ("run", "recipe.yaml", "--dry-run")
    if not root.is_dir():
        return row
    root.rename(pristine)
    files = sorted(path for path in (pristine / "artifacts").rglob("*") if path.is_file() and path.name != RECORD)
    shutil.copytree(pristine, root)
    whole = sandbox.command(command, folder, seconds=60)
    reused = whole.text.count("reuse  ")
    if whole.status or "run    export" in whole.text or not reused:
        row.add("the whole store", "wrong", note=whole.text[-500:])
    for path, bit in chosen(files, count, "resumed"):
        shutil.rmtree(root)
        shutil.copytree(pristine, root)
        own = root / path.relative_to(pristine)
        with flipped(own, bit):
            ended = sandbox.command(command, folder, seconds=60)
            own.parent.mkdir(parents=True, exist_ok=True)
        found = ended.status == 0 and ended.text.count("reuse  ") < reused
        outcome = "hang" if ended.limit else "crash" if ended.status else "clean" if found else "wrong"
        row.add(f"{path.relative_to(pristine)}, bit {bit}", outcome, ended.seconds, ended.peak_mb, ended.text[-200:])
    return row
