"""The page of the examples: whatever it shows, a test runs."""

from tests.command_line import ROOT
from tests.examples_page import BLOCKS, PAGE

RUN = {  # by tests/examples, and what builds by tests/embed
    ("", "python examples/fastapi_app.py"),
    ("sh", "curl"),
    ("python", "VideoWriter"),
    ("sh", "examples/video_loop.py"),
    ("sh", "examples/batch_folder.py"),
    ("sh", "examples/cpp/build.sh"),
    ("sh", "examples/web/build.sh"),
}


def test_every_block_of_commands_is_run():
    named = [(kind, what) for kind, text in BLOCKS for what in {what for _, what in RUN} if what in text]
    assert sorted(named) == sorted(RUN)
    assert sum(kind != "" for kind, _ in BLOCKS) == len(RUN) - 1


def test_every_example_is_on_the_page():
    folder = ROOT / "examples"
    programs = [path for path in folder.rglob("*") if path.suffix in (".py", ".sh")]
    assert programs and all(f"]({path.relative_to(folder).as_posix()})" in PAGE for path in programs)
