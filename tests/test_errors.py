"""Every error: its code, its exit status, its place in the tree of the docstring, what it prints."""

import inspect
import re

import pytest

from vitdeploy import errors

# One branch of the tree: name, then "exit N", or "VDnnnn", or "exit N, VDnnnn".
BRANCH = re.compile(r"^[│├└─ ]*(\w+Error)\s+(?:exit (\d))?(?:, )?(VD\d{4})?\s", re.MULTILINE)
CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, errors.VitdeployError) and cls.__module__ == errors.__name__
]


def documented():
    return {name: (exit_code, code) for name, exit_code, code in BRANCH.findall(errors.__doc__)}


def make(cls):
    if cls is errors.MissingPackageError:
        return cls("openvino", "openvino", "running a graph")
    if cls is errors.RecipeError:
        return cls("recipe.yaml", ["$.name: missing"])
    return cls("a message")


def test_no_two_errors_share_a_code():
    codes = [cls.code for cls in CLASSES]
    assert len(CLASSES) > 20
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_the_first_digit_of_the_code_is_the_exit_status(cls):
    assert re.fullmatch(r"VD[1-5]\d{3}", cls.code)
    assert int(cls.code[2]) == cls.exit_code


def test_the_docstring_lists_exactly_the_classes():
    assert set(documented()) == {cls.__name__ for cls in CLASSES}


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_the_docstring_gives_the_code_or_the_exit_status(cls):
    exit_code, code = documented()[cls.__name__]
    assert exit_code or code
    assert code in ("", cls.code)
    assert exit_code in ("", str(cls.exit_code))


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_the_docstring_shows_whose_subclass_it_is(cls):
    parents, parent = {}, "VitdeployError"
    for line in errors.__doc__.splitlines():
        match = BRANCH.match(line + " ")
        if match:
            depth = line.index(match[1]) // 4
            parents[depth] = match[1]
            if match[1] == cls.__name__ and depth:
                parent = parents[depth - 1]
    assert cls is errors.VitdeployError or cls.__base__.__name__ == parent


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_an_error_begins_with_its_code(cls):
    assert str(make(cls)).startswith(f"{cls.code}  ")


def test_found_wanted_and_fix_stand_on_their_own_lines():
    text = str(errors.DataError("too few images", found="3", expected="10", fix="add images"))
    assert text.splitlines() == [
        "VD2301  too few images",
        "        found:    3",
        "        expected: 10",
        "        fix:      add images",
    ]


def test_lines_that_say_nothing_are_left_out():
    assert str(errors.DataError("too few images", expected="10")).splitlines() == [
        "VD2301  too few images",
        "        expected: 10",
    ]


def test_what_a_terminal_would_obey_is_escaped():
    odd = "a\x1b[2J\0b\rc\u202egnp\ud800 é 犬\u200d"
    error = errors.InputError(f"no {odd}", found=odd)
    assert str(error).split("\n") == [
        "VD2000  no a\\x1b[2J\\x00b\\rc\\u202egnp\\ud800 é 犬\u200d",
        "        found:    a\\x1b[2J\\x00b\\rc\\u202egnp\\ud800 é 犬\u200d",
    ]
    assert errors.visible("a\tb\nc") == "a\tb\nc"


def test_an_error_as_plain_data_has_every_field():
    error = errors.TargetError("is not a target", found="tpu", expected="openvino-cpu")
    assert error.to_dict() == {
        "code": "VD2402",
        "message": "is not a target",
        "exit_code": 2,
        "found": "tpu",
        "expected": "openvino-cpu",
        "fix": "",
    }


def test_a_missing_package_is_named_with_the_extra_that_installs_it():
    error = errors.MissingPackageError("onnx", "export", "exporting")
    assert "onnx" in error.message
    assert error.fix == "pip install 'vitdeploy[export]'"


@pytest.mark.parametrize(("problems", "count"), [(["$.a: missing"], "1 problem"), (["$.a: x", "$.b: y"], "2 problems")])
def test_a_recipe_error_shows_all_problems(problems, count):
    text = str(errors.RecipeError("r.yaml", problems))
    assert f"r.yaml: {count}\n" in text
    assert all(problem in text for problem in problems)
