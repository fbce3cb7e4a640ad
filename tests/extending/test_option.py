"""An option is one field: it is in --help, in the API with its documentation, and in both its checks hold."""

import dataclasses
import inspect
from pathlib import Path

import pytest
from click.testing import CliRunner

import vitdeploy as vd
from tests.extending.toy_option import Paint, paint
from vitdeploy.api import options as every
from vitdeploy.api.option import described
from vitdeploy.api.options import (
    BenchKeywords,
)
from vitdeploy.cli.main import cli
from vitdeploy.cli.options import command_of
from vitdeploy.errors import InputError

FILES = (Path(__file__).parent / "toy_option.py",)


@command_of(Paint, name="paint")
def command(console, options):
    """Paint an image."""
    console.finish({"painted": paint.of(options)}, [paint.of(options)], None)


def run(*words):
    return CliRunner().invoke(command, list(words))


def test_a_field_is_an_option_of_the_command_line():
    told = run("--help").output
    assert "--tint [red|blue]" in told and "Colour of all that is drawn." in told
    assert "--opacity FLOAT RANGE" in told and "Percent of it.  [default: 50.0; 0<=x<=100]" in told
    assert run("a.png", "--tint", "red", "-q").output == "a.png red 50\n"


def test_it_is_a_keyword_of_the_api_with_its_documentation():
    assert str(inspect.signature(paint).parameters["opacity"]) == "opacity: float = 50.0"
    assert "        tint: Colour of all that is drawn.\n" in paint.__doc__
    assert paint("a.png", tint="blue") == "a.png blue 50"


def test_its_range_and_what_goes_together_is_checked_in_both():
    with pytest.raises(InputError, match=r"  opacity is 101; it must be at least 0 and at most 100$"):
        paint("a.png", opacity=101)
    with pytest.raises(InputError, match=r"  opacity 0 needs a tint$"):
        paint("a.png", opacity=0)
    beyond, apart = run("a.png", "--opacity", "101"), run("a.png", "--opacity", "0")
    assert (beyond.exit_code, apart.exit_code) == (2, 2)
    assert "Invalid value for '--opacity'" in beyond.output and "Error: --opacity 0 needs a --tint." in apart.output


def test_functions_have_the_keywords_of_their_options():
    """`*artifacts` are no field that a dataclass could be called with: type checkers have them from a second class."""
    fields = {field.name: field for field, _ in described(every.Bench)}
    assert {*BenchKeywords.__annotations__} == {*fields} - {"artifacts"}
    for name, kind in (("quantize", every.Quantize), ("compile", every.Compile), ("run", every.Run)):
        assert list(inspect.signature(getattr(vd, name)).parameters) == [
            field.name for field in dataclasses.fields(kind)
        ]


@pytest.mark.parametrize(
    ("name", "places"),
    [
        *(("quantize", "graph data target folder"), ("optimize", "graph folder"), ("compile", "graph target folder")),
        *(("verify", "artifact against data"), ("verify_on", "on artifact against data"), ("bench", "artifacts")),
        *(("compare", "baseline candidate data folder"), ("run", "recipe folder"), ("sweep", "recipes folder")),
        *(("deploy", "source data folder"), ("tune", "source data folder"), ("versions", "bundle runtime")),
    ],
)
def test_all_other_options_are_keywords_alone(name, places):
    parameters = inspect.signature(getattr(vd, name)).parameters.values()
    assert [each.name for each in parameters if each.kind != each.KEYWORD_ONLY] == places.split()


@pytest.mark.parametrize("words", [["quantize", "g", "--data", "d", "-o", "o"], ["compile", "g", "--target", "t"]])
def test_what_a_command_needs_is_asked_for(words):
    """Also what the API has a default for, such as the folder."""
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 2 and "Missing option" in done.output
