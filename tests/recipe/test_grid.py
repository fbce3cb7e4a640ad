"""Grids: which recipes they are, what these are called, and what is refused, with its line."""

import itertools
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import vitdeploy
from vitdeploy.api.sweep import write_recipes
from vitdeploy.errors import InputError, MissingFileError, OutputError, RecipeError
from vitdeploy.recipe.grid import MAX_CELLS, is_grid, load_grid
from vitdeploy.recipe.load import load_recipe, value_name
from vitdeploy.yaml_values import Lines, read_yaml, yaml_text

BASE = """
vitdeploy: 1
name: base
source: {model: vit_w32d2h2_patch8_32}
data: {path: images}
targets: [onnxruntime-cpu]
"""
HEAD = "grid: 1\nname: g\nbase: base.yaml\n"
AXES = "axes:\n  precision: [fp32, int8]\n  targets: [[onnxruntime-cpu], [openvino-cpu]]\n"


@pytest.fixture
def grid(tmp_path):
    """Loads a grid of this text, beside the base."""
    (tmp_path / "base.yaml").write_text(BASE)

    def load(text, head=HEAD, **given):
        (tmp_path / "grid.yaml").write_text(head + text)
        return load_grid(tmp_path / "grid.yaml", **given)

    return load


def names(found):
    return [each.recipe.name for each in found]


def recipes(found):
    return [each.recipe for each in found]


def problems(grid, text, **given):
    with pytest.raises(RecipeError) as refused:
        grid(text, **given)
    assert "vitdeploy sweep --help" in refused.value.fix
    return refused.value.problems


# --- which recipes ----------------------------------------------------------------------------------------------------


def test_axes_combine_and_the_last_changes_fastest(grid):
    found = grid(AXES)
    assert names(found) == [f"g-{p}-{t}-cpu" for p in ("fp32", "int8") for t in ("onnxruntime", "openvino")]
    assert [(each.precision, each.targets) for each in recipes(found)] == [
        (p, (f"{t}-cpu",)) for p in ("fp32", "int8") for t in ("onnxruntime", "openvino")
    ]
    assert found[0].choices == (("precision", "fp32"), ("targets", "[onnxruntime-cpu]"))


def test_a_rule_to_exclude_needs_to_match_in_part_alone(grid):
    found = grid(AXES + "exclude:\n  - {precision: int8, targets: [openvino-cpu]}\n  - {precision: fp32}\n")
    assert names(found) == ["g-int8-onnxruntime-cpu"]


def test_what_is_included_extends_cells_or_is_one(grid):
    text = (
        AXES
        + "include:\n  - {precision: int8, bench.duration: 1}\n  - {precision: bf16}\n  - {precision: int4, name: x}\n"
    )
    found = grid(text)
    assert names(found)[4:] == ["g-bf16", "x"]
    assert [each.bench.duration == 1 for each in recipes(found)] == [False, False, True, True, False, False]
    assert [each.precision for each in recipes(found)[4:]] == ["bf16", "int4"]


def test_named_values_are_called_so_in_cells_and_rules(grid):
    text = "axes:\n  source:\n    tiny: {model: vit_w32d2h2_patch8_32}\n    mine: {checkpoint: w.pt, heads: 2}\n"
    found = grid(text + "exclude: [{source: tiny}]\ninclude: [{source: mine, vnni: true}]\n")
    assert names(found) == ["g-mine"] and dict(found[0].choices)["source"] == "mine"
    [recipe] = recipes(found)
    assert recipe.source.heads == 2 and recipe.vnni is True


def test_paths_start_at_the_folder_of_the_grid(grid, tmp_path):
    found = grid("axes:\n  data.path: [one/images, other]\n")
    assert names(found) == ["g-images", "g-other"]
    assert [each.data.path for each in recipes(found)] == [str(tmp_path / "one/images"), str(tmp_path / "other")]


def test_overrides_of_the_command_line_come_last_but_for_axes(grid):
    assert names(grid(AXES, overrides=["bench.duration=2"]))
    assert problems(grid, AXES, overrides=["precision=fp32"]) == ["--set precision=fp32: this is an axis of the grid"]


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_excluded_are_those_that_match(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("grid")
    (folder / "base.yaml").write_text(BASE)
    axes = {
        "precision": data.draw(st.lists(st.sampled_from(["fp32", "int8", "fp16"]), min_size=1, unique=True)),
        "bench.duration": data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True)),
        "vnni": data.draw(st.lists(st.booleans(), min_size=1, unique=True)),
    }
    every = [dict(zip(axes, each, strict=True)) for each in itertools.product(*axes.values())]
    rule = {
        field: data.draw(st.sampled_from(axes[field]))
        for field in data.draw(st.sets(st.sampled_from([*axes]), min_size=1))
    }
    left = [each for each in every if any(each[field] != value for field, value in rule.items())]
    file = folder / "grid.yaml"
    file.write_text(yaml.safe_dump({"grid": 1, "name": "g", "base": "base.yaml", "axes": axes, "exclude": [rule]}))
    if not left:
        with pytest.raises(RecipeError, match="no recipe is left"):
            load_grid(file)
        return
    found = [(r.precision, r.bench.duration, r.vnni) for r in recipes(load_grid(file))]
    key = lambda each: tuple(map(str, each))  # noqa: E731 - YAML sorts the axes
    assert sorted(found, key=key) == sorted((tuple(each.values()) for each in left), key=key)


# --- names and texts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "name"),
    [
        ("precision", "int8", "int8"),
        ("source.image_size", 224, "image_size224"),
        ("vnni", True, "vnnitrue"),
        ("budget.max_drop", None, "max_dropnone"),
        ("targets", ["a-cpu", "b-cpu"], "a-cpu_b-cpu"),
        ("source.checkpoint", "weights/vit tiny.safetensors", "vit-tiny"),
        ("source", {"model": "x"}, ""),
        ("source.model", "...", ""),
    ],
)
def test_the_name_of_a_value(field, value, name):
    assert value_name(field, value) == name


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(10**9), 10**9)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text("ab: #'\"{}[],\né-1e5.", max_size=200),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=3),
    )
)
def test_a_value_in_one_line_is_read_back_as_it_is(value):
    found = read_yaml(yaml_text(value))
    assert found == value and type(found) is type(value)


def test_the_line_of_a_value():
    lines = Lines("a: 1\nb:\n  - x\n  - {c: 2,\n     d: 3}\n")
    assert [lines.of(path) for path in (["a"], ["b", 0], ["b", 1, "d"], ["b", 9], ["zz"], ["a", "x"])] == [
        1,
        3,
        5,
        3,
        1,
        1,
    ]


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("axes: {}\n", "$.axes: dictionary should have at least 1 item"),
        ("axes: {precision: []}\n", "line 4: $.axes.precision: no value; give at least one"),
        ("axes: {precision: [int8, int8]}\n", "line 4: $.axes.precision: int8 occurs 2 times"),
        ("axes:\n  name: [a, b]\n", "line 5: $.axes.name: not allowed as an axis; the grid names its recipes"),
        ("axes:\n  data: {a: {path: x}}\n  data.path: [x]\n", "line 6: $.axes.data.path: part of the axis data"),
        ("axes:\n  data:\n    - {path: x}\n", "line 6: $.axes.data: a value without a name; write NAME: {path: x}"),
        ("axes:\n  precision:\n    - int8\n    - int7\n", "line 7: $.precision: input should be "),
        ("axes:\n  precison: [int8]\n", "line 5: $.precison: unknown field; did you mean precision?"),
        ("axes:\n  source.modle: [x]\n", "line 5: $.source.modle: unknown field; did you mean model?"),
        ("axes:\n  name.x: [y]\n", "line 5: --set 'name.x=y': $.name is not a mapping"),
        ("axes:\n  a..b: [y]\n", "line 5: --set 'a..b=y': expected a.b=value"),
        (
            AXES + "exclude:\n  - {precision: int4}\n",
            "line 8: $.exclude[0]: matches no combination of the axes; precision is one of fp32, int8",
        ),
        (
            AXES + "exclude:\n  - {precission: int8}\n",
            "line 8: $.exclude[0]: no axis precission; the axes are precision, targets",
        ),
        (AXES + "exclude:\n  - {precision: int8}\n  - {precision: fp32}\n", "line 8: $.exclude: no recipe is left"),
        (
            AXES + "include:\n  - {precision: int4}\n  - {precision: int4}\n",
            "line 9: $.include[1]: repeats an earlier entry",
        ),
        (AXES + "include:\n  - {precision: int8}\n", "line 8: $.include[0]: already in the grid"),
        (
            AXES + "include:\n  - {precision: int4, source: {model: x}}\n",
            "a value without a name; give the entry a name",
        ),
        ("axes:\n  data.path: [a/x, b/x]\n", "have the same name, g-x; give their values names"),
        (f"axes:\n  precision: {{{'a' * 70}: int8}}\n", "is longer than 64 characters"),
        (
            f"axes:\n  data.seed: {list(range(30))}\n  bench.duration: {list(range(1, 31))}\n",
            f"900 recipes, at most {MAX_CELLS}",
        ),
        ("axis: {precision: [int8]}\n", "$.axis: unknown field; did you mean axes?"),
    ],
)
def test_what_is_no_grid(grid, text, told):
    assert any(told in problem for problem in problems(grid, text)), problems(grid, text)


def test_a_problem_of_many_cells_is_told_once(grid):
    assert len(problems(grid, AXES.replace("int8", "int7"))) == 1


def test_a_problem_of_the_base_is_told_with_its_file(grid, tmp_path):
    (tmp_path / "base.yaml").write_text(BASE + "budget: {max_dorp: 1}\n")
    [told] = problems(grid, AXES)
    assert told.startswith(f"{tmp_path / 'base.yaml'}: $.budget.max_dorp: unknown field")


def test_a_base_that_is_not_there_or_no_recipe(grid):
    with pytest.raises(MissingFileError, match=r"other\.yaml"):
        grid(AXES, head=HEAD.replace("base.yaml", "other.yaml"))
    with pytest.raises(InputError, match="is a grid of recipes"):
        grid(AXES, head=HEAD.replace("base.yaml", "grid.yaml"))


def test_a_grid_is_no_recipe(grid, tmp_path):
    grid(AXES)
    assert is_grid(tmp_path / "grid.yaml") and not is_grid(tmp_path / "base.yaml")
    with pytest.raises(InputError, match="is a grid of recipes") as refused:
        load_recipe(tmp_path / "grid.yaml")
    assert "vitdeploy sweep" in refused.value.fix


def test_the_recipes_of_a_grid_as_files_are_those_recipes(grid, tmp_path):
    found = grid("axes:\n  data.path: [one, sub/two]\n  precision: [fp32, int8]\n")
    (tmp_path / "written").mkdir()
    file = found[0].file
    written = write_recipes([file], tmp_path / "written")
    assert [path.name for path in written] == [f"{name}.yaml" for name in names(found)]
    again = [load_recipe(path) for path in written]
    assert [Path(each.data.path).resolve() for each in again] == [Path(each.data.path) for each in recipes(found)]
    assert [each.precision for each in again] == ["fp32", "int8"] * 2
    assert "From grid.yaml" in written[0].read_text()
    write_recipes([file], tmp_path / "written")
    (tmp_path / "written" / "mine.txt").write_text("kept")
    with pytest.raises(OutputError):
        write_recipes([file], tmp_path / "written")


def test_the_grid_of_the_digits():
    found = load_grid(Path(vitdeploy.__file__).parents[1] / "recipes" / "grids" / "digits.yaml")
    assert names(found) == [
        *("digits-fp32-openvino-cpu", "digits-fp32-onnxruntime-cpu"),
        *("digits-int8-openvino-cpu", "digits-int8-onnxruntime-cpu", "digits-bf16-openvino-cpu"),
    ]
    assert [each.bench.duration for each in recipes(found)] == [3, 3, 5, 5, 3]


def test_two_recipes_of_one_name_are_not_written(grid, tmp_path):
    file = grid(AXES)[0].file
    with pytest.raises(InputError, match="the same name"):
        write_recipes([file, file], tmp_path / "written")
