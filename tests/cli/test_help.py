"""The command's own help, what a shell completes, and what an interrupt says."""

import pytest
from click.shell_completion import ShellComplete

from tests.command_line import command_line
from vitdeploy.cli.main import COMMANDS, LAB, SECTIONS, _interrupted, cli


@pytest.fixture
def run(tmp_path):
    with command_line(tmp_path, tmp_path / "store") as run:
        yield run


def test_commands_are_listed_in_groups_and_sign_stands_once(run):
    told = run("--help").stdout
    assert [line[:-1] for line in told.splitlines() if line.rstrip(":") in SECTIONS] == list(SECTIONS)
    assert [line.split()[0] for line in told.splitlines() if line.startswith("  ") and line.split()[0] in COMMANDS] == [
        *COMMANDS
    ]
    assert "sign" in run("bundle", "--help").stdout
    assert "Did you mean 'bundle sign'?" in run("sign", "--help").stderr
    assert "Did you mean 'lab selftest'?" in run("selftest").stderr
    words = [line.split()[0] for line in run("lab", "--help").stdout.splitlines() if line.startswith("  ")]
    assert [word for word in words if word in LAB] == [*LAB]


@pytest.mark.parametrize("command", ["verify", "quantize", "bench", "serve", "run", "compile", "predict"])
def test_many_options_are_listed_under_two_headings(run, command):
    _, options = run(command, "--help").stdout.split("\nOptions:\n")
    often, rarely = ([line.split()[0] for line in text.splitlines() if line.startswith("  -")]
                     for text in options.split("\nAdvanced:\n"))  # fmt: skip
    assert {"--json", "-h,"} < {*often} and len(often) <= 17
    known = {f"--{name}" for name in ("trust", "expect-digest", "executor", "jobs", "accept-known-bad", "report-to")}
    assert {*rarely} & known and not {*often} & known and not {*often} & {*rarely}


def test_few_options_are_listed_under_one_heading(run):
    shown = run("bundle", "verify", "--help").stdout
    assert "--trust" in shown and "Advanced:" not in shown


def test_without_a_command_it_names_the_next_one(run, tmp_path):
    """By what the working folder has: nothing, another tool's file, a recipe, a bundle."""

    def following():
        [step] = [line for line in run().stdout.splitlines() if line.startswith("next: ")]
        return step.removeprefix("next: ")

    (tmp_path / "compose.yaml").write_text("services: {}\n")
    assert following().startswith("vitdeploy doctor")
    (tmp_path / "my recipe.yaml").write_text("# mine\nvitdeploy: 1\n")
    assert following() == "vitdeploy run 'my recipe.yaml'"
    (tmp_path / "out" / "mine").mkdir(parents=True)
    (tmp_path / "out" / "mine" / "manifest.json").write_text("{}")
    assert following() == "vitdeploy predict out/mine IMAGE"


def completed(*words):
    *before, begun = words
    found = ShellComplete(cli, {}, "vitdeploy", "_VITDEPLOY_COMPLETE").get_completions(list(before), begun)
    return [item.value for item in found]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("se",), ["serve"]),
        (("lab", ""), ["selftest", "versions", "completion"]),
        (("bundle", ""), ["pack", "sign", "unpack", "verify"]),
        (("compile", "x", "--target", "openvino-c"), ["openvino-cpu"]),
        (("predict", "x", "--target", "a"), ["auto"]),
        (("export", "vit_tiny"), ["vit_tiny_patch16_224", "vit_tiny_patch16_384"]),
        (("verify", "x", "--against", "transformer_b"), ["transformer_base", "transformer_big"]),
        (("embed", "x", "--a"), ["--as"]),
    ],
)
def test_a_shell_is_offered(words, expected):
    assert completed(*words) == expected


def test_devices_are_offered_by_name_and_label(run, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert run("devices", "add", "pi", "ssh://me@10.0.0.7", "--label", "board").returncode == 0
    assert completed("bench", "x", "--on", "") == ["local", "pi", "board"]
    assert completed("bench", "x", "--on", "local,p") == ["local,pi"]
    assert completed("devices", "remove", "") == ["pi", "board"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_lines_for_a_shell(run, shell):
    done = run("lab", "completion", shell)
    assert done.returncode == 0
    assert f"_VITDEPLOY_COMPLETE={shell}_complete" in done.stdout


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("run r.yaml", "to resume from the last finished stage (measurements are repeated)"),
        ("run r.yaml --no-resume", "interrupted"),
        ("bench a b", "interrupted"),
        ("export m -o out", "interrupted; nothing was written"),
    ],
)
def test_an_interrupt_promises_what_is_stored_only(command, says):
    assert _interrupted(command.split()).endswith(says)


@pytest.mark.parametrize(("word", "count"), [("swin", 6), ("SWIN_TINY", 1), ("swin*", 6), ("in_tiny*", 0)])
def test_models_are_listed_by_a_word_of_their_names(run, word, count):
    assert len(run("export", "list", word, "--json").document["models"]) == count
