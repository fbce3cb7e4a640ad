"""Running a plan: what is made, what is reused, and what a change makes again. The steps here write small texts."""

import dataclasses
import hashlib
import shutil

import pytest

from vitdeploy.bundle.read import file_sha256
from vitdeploy.pipeline.run import preview, run_plan
from vitdeploy.progress import silent
from vitdeploy.runtime.trust import is_trusted, register, registry
from vitdeploy.spec import EngineSpec, encode
from vitdeploy.stages.step import Step, may_load, write_json
from vitdeploy.store.store import Store

ENGINE = EngineSpec("tensorrt", "fp16", "graph.onnx", ("engine.plan",), 1, True, "TensorRT", (), ())


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


def writes(name, *inputs, outside="a", text=None, given=None, **changes):
    """A step whose file holds its name (or `text`) and the content of its inputs; code of `given` counts as its own."""

    def write(folders, out, progress):
        assert given in (None, ENGINE)
        parts = [(folders[i].path / "file").read_text(encoding="utf-8") for i in inputs]
        (out / "file").write_text(f"{text or name}({','.join(parts)})", encoding="utf-8")

    return Step(name, name.split()[0], write, {}, inputs, {"outside": outside}, **changes)


def plan(**changes):
    """a <- b <- c, and d beside them; `changes` are those of step a."""
    return [writes("a", **changes), writes("b", "a"), writes("c", "b"), writes("d")]


def made_and_reused(steps, store, resume=True):
    """The names of the steps that were made, those that were reused, and the content of the last but one."""
    names = {False: "", True: ""}

    def finished(step, reused):
        names[reused] += step.name

    artifacts = run_plan(steps, store, resume=resume, progress=silent, finished=finished)
    return names[False], names[True], (artifacts["c"].path / "file").read_text(encoding="utf-8")


def test_a_second_run_reuses_every_step(store):
    assert made_and_reused(plan(), store) == ("abcd", "", "c(b(a()))")
    assert made_and_reused(plan(), store) == ("", "abcd", "c(b(a()))")


def test_without_resume_every_step_is_made_again(store):
    made_and_reused(plan(), store)
    assert made_and_reused(plan(), store, resume=False) == ("abcd", "", "c(b(a()))")


def test_another_input_makes_again_what_depends_on_it(store):
    made_and_reused(plan(), store)
    assert made_and_reused(plan(outside="b", text="A"), store) == ("abc", "d", "c(b(A()))")


def test_what_depends_on_a_step_is_reused_when_the_step_makes_the_same_bytes(store):
    made_and_reused(plan(), store)
    assert made_and_reused(plan(outside="b"), store) == ("a", "bcd", "c(b(a()))")


@pytest.mark.parametrize("change", [{"given": ENGINE}, {"packages": {"torch": "9"}}, {"outside": "b"}])
def test_a_step_is_made_again_when_its_code_packages_or_files_change(store, change):
    made_and_reused(plan(), store)
    made, _, _ = made_and_reused(plan(**change), store)
    assert made == "a"


def test_a_damaged_artifact_is_made_again_and_kept_aside(store):
    steps = plan()
    artifacts = run_plan(steps, store, resume=True, progress=silent)
    (artifacts["b"].path / "file").write_text("damaged", encoding="utf-8")
    assert made_and_reused(steps, store) == ("b", "acd", "c(b(a()))")
    assert len(list((store.root / "quarantine").iterdir())) == 1


def test_a_step_that_fails_leaves_the_steps_before_it_and_nothing_of_its_own(store):
    def write(folders, out, progress):
        (out / "file").write_text("half", encoding="utf-8")
        raise OSError("broken")

    first, second, *rest = plan()
    broken = Step("b", "b", write, second.config, second.inputs, second.outside)
    with pytest.raises(OSError, match="broken"):
        run_plan([first, broken, *rest], store, resume=True, progress=silent)
    assert not list(store.root.rglob(".tmp-*"))
    assert made_and_reused(plan(), store) == ("bcd", "a", "c(b(a()))")


def test_a_preview_shows_what_a_run_would_reuse_and_makes_nothing(store):
    assert preview(plan(), store) == [(name, False) for name in "abcd"]
    assert not store.root.exists()
    made_and_reused(plan(), store)
    assert preview(plan(), store) == [(name, True) for name in "abcd"]
    assert preview(plan(outside="b"), store) == [("a", False), ("b", False), ("c", False), ("d", True)]


@pytest.mark.parametrize(("resume", "content"), [(True, "half and whole"), (False, "whole")])
def test_a_resumable_step_finds_what_an_interrupted_run_kept(store, resume, content):
    """Ctrl-C in the first run; the folder is the step's own, and goes with the artifact."""
    interrupted = []

    def write(folders, out, progress, scratch):
        kept = scratch / "kept"
        text = kept.read_text(encoding="utf-8") if kept.is_file() else ""
        if not interrupted:
            interrupted.append(scratch)
            scratch.mkdir(parents=True)
            kept.write_text("half and ", encoding="utf-8")
            raise KeyboardInterrupt
        (out / "file").write_text(f"{text}whole", encoding="utf-8")

    step = Step("c", "c", write, {}, resumable=True)
    with pytest.raises(KeyboardInterrupt):
        run_plan([step], store, resume=True, progress=silent)
    others = []
    other = Step("c", "c", lambda _, out, progress, scratch: others.append(scratch), {"other": 1}, resumable=True)
    run_plan([other], store, resume=True, progress=silent)
    assert others != interrupted
    artifacts = run_plan([step], store, resume=resume, progress=silent)
    assert (artifacts["c"].path / "file").read_text(encoding="utf-8") == content
    assert not interrupted[0].exists()


# --- engines that are code --------------------------------------------------------------------------------------------


def test_an_engine_that_the_user_no_longer_trusts_is_built_again(store, tmp_path, monkeypatch):
    """The registry went, or the store is another machine's: what is found there is made again, and then found."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    built = []

    def write(folders, out, progress):
        plan = f"plan {len(built)}".encode()
        built.append(hashlib.sha256(plan).hexdigest())
        (out / "engine.plan").write_bytes(plan)
        write_json(out / "engine.json", encode(ENGINE))
        register(built[-1], {})

    steps = [Step("compile", "compile", write, {}, usable=may_load), writes("verify", text="v")]

    def run():
        found = []
        artifacts = run_plan(
            steps, store, resume=True, progress=silent, finished=lambda step, reused: found.append(reused)
        )
        assert is_trusted(file_sha256(artifacts["compile"].path / "engine.plan"))
        return found

    assert run() == [False, False]
    assert run() == [True, True]
    assert preview(steps, store)[0] == ("compile", True)
    shutil.rmtree(registry())
    assert preview(steps, store)[0] == ("compile", False)
    assert run() == [False, True]
    assert run() == [True, True]
    assert len(built) == 2


def test_an_engine_that_is_no_code_needs_nobodys_trust(tmp_path):
    write_json(tmp_path / "engine.json", encode(dataclasses.replace(ENGINE, target="onnxruntime-cpu")))
    assert may_load(tmp_path)
