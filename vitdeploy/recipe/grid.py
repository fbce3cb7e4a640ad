"""A grid: one recipe in many variants, one for each combination of the values of some fields.

Like the matrix of a CI job: every combination of the axes' values, without those that `exclude` matches, plus the
entries of `include`. Fields are named as in `--set`.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from vitdeploy.errors import InputError, RecipeError
from vitdeploy.recipe.load import GRID, MAX_PROBLEMS, anchor, cut, load_recipe, problem_line, read_fields, value_name
from vitdeploy.recipe.recipe import Recipe, Section
from vitdeploy.yaml_values import Lines, yaml_text

# A recipe takes at least a minute: more would run for longer than a night.
MAX_CELLS = 500
FIX = "`vitdeploy sweep --help` shows a grid"
# Maximum length of the names of recipes and folders.
MAX_NAME = 64
NAME, GRAPH_NAME = "name", "export.name"

Rules = Annotated[tuple[Annotated[dict[str, Any], Field(min_length=1)], ...], Field(strict=False)]


class _GridFile(Section):
    """The schema of a grid: `base` is the recipe whose fields the axes override. An axis is a field with its values, or
    with a mapping of names to values; a name then stands for its value in rules and in the names of cells."""

    grid: Literal[1]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,31}$")]
    base: str
    axes: Annotated[dict[str, list[Any] | dict[str, Any]], Field(min_length=1)]
    exclude: Rules = ()
    include: Rules = ()


@dataclass(frozen=True)
class Choice:
    """A value of a field with its label in rules and tables; `line` is its line in the grid's file."""

    label: str
    name: str
    value: Any
    line: int


@dataclass(frozen=True)
class ListedRecipe:
    """A recipe to run. `file`: the file that contains it; `choices`: for a cell of a grid, its axes as (field, label of
    the value)."""

    recipe: Recipe
    file: Path
    choices: tuple[tuple[str, str], ...] = ()


def is_grid(path: Path) -> bool:
    """Whether a file is a grid, not a recipe; errors as in `load_recipe`."""
    data = read_fields(path)
    return GRID in data and "vitdeploy" not in data


def list_recipes(
    paths: Sequence[str | Path], overrides: Sequence[str] = (), function: str | None = None
) -> list[ListedRecipe]:
    """Return the recipes of files, which may be grids, all validated; arguments and errors as in `load_grid`.

    Raises:
        InputError: two recipes have the same name, so their bundles would too.
    """
    listed: list[ListedRecipe] = []
    for path in map(Path, paths):
        grid = load_grid(path, overrides, function) if is_grid(path) else None
        listed += grid or [ListedRecipe(load_recipe(path, overrides, function), path)]
    before: dict[str, Path] = {}
    for recipe in listed:
        name = recipe.recipe.name
        if name in before:
            raise InputError(
                "two recipes have the same name, so their bundles would too",
                found=f"{name}: {before[name]} and {recipe.file}",
                expected="a different name for each recipe",
                fix="change the name in one of the files",
            )
        before[name] = recipe.file
    return listed


def load_grid(path: Path, overrides: Sequence[str] = (), function: str | None = None) -> list[ListedRecipe]:
    """Return the recipes of a grid in the order of its file, validated: the last axis changes fastest, included ones
    come last. Paths in the file are relative to it.

    Args:
        overrides: overrides of each recipe, after the grid's; `function` as for `load_recipe`.

    Raises:
        MissingFileError: the file or its base does not exist.
        RecipeError: invalid axes, rules, names or recipes: all problems of a kind at once, with their lines.
    """
    data = read_fields(path)
    try:
        file = _GridFile.model_validate(data)
    except ValidationError as error:
        errors = error.errors()
        problems = [problem_line(problem, _GridFile) for problem in errors[:MAX_PROBLEMS]]
        raise RecipeError(str(path), problems, len(errors) - len(problems), fix=FIX) from None
    lines = Lines(path.read_text(encoding="utf-8-sig"))
    reader = _Reader(path, file, lines)
    combinations = reader.combinations()
    names = reader.names(combinations)
    if taken := [override for override in overrides if override.partition("=")[0] in file.axes]:
        raise RecipeError(str(path), [f"--set {cut(each)}: this is an axis of the grid" for each in taken], fix=FIX)
    return reader.recipes(combinations, names, overrides, function)


# The choices of one cell, by field.
_Choices = dict[str, Choice]


class _Reader:
    """Turns a grid file into cells; `refuse` raises its problems."""

    def __init__(self, path: Path, file: _GridFile, lines: Lines) -> None:
        self.path, self.file, self.lines = path, file, lines
        self.axes = {field: self._axis(field) for field in file.axes}

    def refuse(self, problems: Sequence[str]) -> None:
        if problems:
            more = len(problems) - MAX_PROBLEMS
            raise RecipeError(str(self.path), list(problems[:MAX_PROBLEMS]), max(0, more), fix=FIX)

    def _axis(self, field: str) -> list[Choice]:
        values = self.file.axes[field]
        items: Iterator[tuple[str | int, Any]] = iter(values.items() if isinstance(values, dict) else enumerate(values))
        return [self._choice(field, value, ("axes", field, key), key) for key, value in items]

    def _choice(self, field: str, value: Any, path: Sequence[str | int], key: str | int = 0) -> Choice:
        """A value with its name: the key of a mapping, or derived from the value."""
        label = key if isinstance(key, str) else yaml_text(value)
        name = value_name(field, key if isinstance(key, str) else value)
        return Choice(label, name, self._anchored(field, value), self.lines.of(path))

    def _anchored(self, field: str, value: Any) -> Any:
        """The value; its relative paths start at the folder of the grid."""
        *above, last = field.split(".")
        data: dict[str, Any] = {last: value}
        for key in reversed(above):
            data = {key: data}
        anchor(data, self.path.parent)
        found: Any = data
        for key in field.split("."):
            found = found[key]
        return found

    def combinations(self) -> list[_Choices]:
        """The choices of the cells: all combinations except the excluded ones, then the included ones."""
        self.refuse(list(self._axis_problems()))
        count = math.prod(map(len, self.axes.values()))
        if count + len(self.file.include) > MAX_CELLS:
            line, cells = self.lines.of(["axes"]), count + len(self.file.include)
            self.refuse([f"line {line}: {cells:,} recipes, at most {MAX_CELLS}; leave values out, or split the grid"])
        made = [dict(zip(self.axes, each, strict=True)) for each in itertools.product(*self.axes.values())]
        kept = self._included(self._without_excluded(made))
        self.refuse([] if kept else [f"line {self.lines.of(['exclude'])}: $.exclude: no recipe is left"])
        return kept

    def _axis_problems(self) -> Iterator[str]:
        for field, choices in self.axes.items():
            at = f"line {self.lines.of(['axes', field])}: $.axes.{cut(field)}"
            within = next((other for other in self.axes if field.startswith(f"{other}.")), None)
            if not choices:
                yield f"{at}: no value; give at least one, or leave the axis out"
            if field in (NAME, "vitdeploy"):
                yield f"{at}: not allowed as an axis; the grid names its recipes"
            if within is not None:
                yield f"{at}: part of the axis {cut(within)}, which would override it; leave one of them out"
            for label, count in Counter(choice.label for choice in choices).items():
                if count > 1:
                    yield f"{at}: {cut(label)} occurs {count} times"
            for choice in choices:
                if choice.name == "":
                    expected = f"NAME: {cut(choice.label)}"
                    yield f"line {choice.line}: $.axes.{cut(field)}: a value without a name; write {expected}"

    def _without_excluded(self, made: list[_Choices]) -> list[_Choices]:
        problems, gone = [], set()
        for index, rule in enumerate(self.file.exclude):
            at = f"line {self.lines.of(['exclude', index])}: $.exclude[{index}]"
            unknown = [field for field in rule if field not in self.axes]
            found = {number for number, cell in enumerate(made) if not unknown and self._matches(rule, cell)}
            if unknown:
                problems.append(f"{at}: no axis {cut(', '.join(unknown))}; the axes are {', '.join(self.axes)}")
            elif not found:
                problems.append(f"{at}: matches no combination of the axes; {self._nearest(rule)}")
            gone |= found
        self.refuse(problems)
        return [cell for number, cell in enumerate(made) if number not in gone]

    def _nearest(self, rule: Mapping[str, Any]) -> str:
        """A hint on the first axis that a rule does not match."""
        for field, value in rule.items():
            labels = [choice.label for choice in self.axes[field]]
            if self._label(field, value) not in labels:
                return cut(f"{field} is one of {', '.join(labels)}")
        return "each cell has one value per axis"

    def _label(self, field: str, value: Any) -> str:
        """The label of a value of a field in rules."""
        named = isinstance(self.file.axes.get(field), dict) and isinstance(value, str)
        return str(value) if named else yaml_text(value)

    def _matches(self, rule: Mapping[str, Any], cell: _Choices) -> bool:
        """Whether a cell has all axis values of a rule."""
        return all(
            self._label(field, value) == cell[field].label for field, value in rule.items() if field in self.axes
        )

    def _included(self, made: list[_Choices]) -> list[_Choices]:
        """Apply each entry to all cells with its axis values, as in a CI matrix. If no cell matches, the entry becomes
        a new cell, with the base's value for each axis that it does not name."""
        found, added, problems = [dict(cell) for cell in made], [], []
        for index, rule in enumerate(self.file.include):
            at = f"line {self.lines.of(['include', index])}: $.include[{index}]"
            if rule in self.file.include[:index]:
                problems.append(f"{at}: repeats an earlier entry")
                continue
            matching = [number for number, cell in enumerate(made) if self._matches(rule, cell)]
            if matching and set(rule) <= set(self.axes):
                problems.append(f"{at}: already in the grid; leave it out, or add a field")
            choices = {field: self._of_rule(field, rule[field], index) for field in rule}
            for number in matching:
                found[number] |= {field: each for field, each in choices.items() if field not in self.axes}
            if not matching:
                added.append(choices)
        self.refuse(problems)
        return [*found, *added]

    def _of_rule(self, field: str, value: Any, index: int) -> Choice:
        label = self._label(field, value)
        known = next((choice for choice in self.axes.get(field, ()) if choice.label == label), None)
        path = ("include", index, field)
        return self._choice(field, value, path) if known is None else known

    def names(self, combinations: Sequence[_Choices]) -> list[str]:
        """The names of the cells, all different."""
        problems = []
        first: dict[str, _Choices] = {}
        names = list(map(self._name, combinations))
        for choices, name in zip(combinations, names, strict=True):
            at = f"line {max(choice.line for choice in choices.values())}"
            other = first.setdefault(name, choices)
            if not name:
                problems.append(f"{at}: {_shown(choices)}: a value without a name; give the entry a {NAME}")
            elif other is not choices:
                twice = f"{_shown(other)} and {_shown(choices)} have the same name, {cut(name)}"
                problems.append(f"{at}: {twice}; give their values names, NAME: VALUE, or an entry of include a {NAME}")
            elif len(name) > MAX_NAME:
                long = f"{at}: the name {cut(name)} is longer than {MAX_NAME} characters"
                problems.append(f"{long}; give its values shorter names, NAME: VALUE")
        self.refuse(problems)
        return names

    def _name(self, choices: _Choices) -> str:
        """The name of a cell: from its axes, or from all its fields if it lacks an axis."""
        if NAME in choices:
            return str(choices[NAME].value)
        parts = [choices[field].name for field in (self.axes if set(self.axes) <= set(choices) else choices)]
        return "-".join([self.file.name, *parts]) * all(parts)

    def recipes(
        self, combinations: Sequence[_Choices], names: Sequence[str], overrides: Sequence[str], function: str | None
    ) -> list[ListedRecipe]:
        """The recipe of each cell; a shared problem is reported once, with the line of the value that causes it."""
        base, listed, problems = self.path.parent / self.file.base, [], dict[str, None]()
        for choices, name in zip(combinations, names, strict=True):
            values = [f"{field}={yaml_text(choice.value)}" for field, choice in _values(choices).items()]
            # The graph is named after the grid, so that recipes with the same graph share its file.
            graph = [] if GRAPH_NAME in choices else [f"{GRAPH_NAME}={self.file.name}"]
            try:
                recipe = load_recipe(base, (*values, *graph, f"{NAME}={yaml_text(name)}", *overrides), function)
            except RecipeError as error:
                problems |= dict.fromkeys(_with_line(problem, choices, base) for problem in error.problems)
            else:
                labels = ((field, choice.label) for field, choice in _values(choices).items())
                listed.append(ListedRecipe(recipe, self.path, tuple(labels)))
        self.refuse(list(problems))
        return listed


def _values(choices: _Choices) -> _Choices:
    """The choices without the name of the cell."""
    return {field: choice for field, choice in choices.items() if field != NAME}


def _shown(choices: _Choices) -> str:
    return cut("{" + ", ".join(f"{field}: {choice.label}" for field, choice in _values(choices).items()) + "}")


def _with_line(problem: str, choices: _Choices, base: Path) -> str:
    """A problem with the line of the choice that causes it, or with the base."""
    path = problem.removeprefix("$.").partition(":")[0]
    for field, choice in choices.items():
        ours = f"{path}.".startswith((f"{field}.", f"{field}[")) or field.startswith(f"{path}.")
        if ours or problem.startswith((f"--set '{field}=", f'--set "{field}=')):
            return f"line {choice.line}: {problem}"
    return f"{base}: {problem}"
