"""What a module can run, read from its text: held against Python's own parser, and against small packages."""

import ast

import pytest

from vitdeploy.store.sources import HOME, PACKAGE, imports, source_digest


def parsed(text, modules):
    """What `imports` is to find, by the syntax tree."""
    found = set()

    def visit(node):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for other in node.orelse:
                visit(other)
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import, which `imports` does not read"
            for alias in node.names:
                member = f"{node.module}.{alias.name}"
                found.add(member if member in modules else node.module)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name, attribute = (*node.value.split(":"), "")[:2]
            if attribute or (name in modules and modules[name].name != "__init__.py"):
                found.add(name)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(text))
    return found & modules.keys()


def modules_in(home):
    names = {path.relative_to(home).with_suffix("").as_posix().replace("/", "."): path for path in home.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in names.items() if name != f"{PACKAGE}.__init__"}


def test_no_import_of_the_package_is_missed():
    modules = {name: path for name, path in modules_in(HOME).items() if name.startswith(f"{PACKAGE}.")}
    texts = {name: path.read_text(encoding="utf-8") for name, path in modules.items()}
    wanted = {name: parsed(text, modules) for name, text in texts.items()}
    assert sum(map(len, wanted.values())) > 1000
    missed = {name: wanted[name] - imports(text, modules) for name, text in texts.items()}
    assert not any(missed.values()), {name: found for name, found in missed.items() if found}


def write(home, **texts):
    """A package of a few modules with these texts in a new folder; those that are not named are empty."""
    for name, text in {"__init__": "", "b": "", "c": "", "d": "", "sub/__init__": "", "sub/e": "", **texts}.items():
        path = home / PACKAGE / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return home


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import vitdeploy\nfrom vitdeploy import b\n", {"b"}),
        ("from vitdeploy.b import name\nfrom vitdeploy.sub import e\n", {"b", "sub.e"}),
        ("from vitdeploy import (\n    b,  # (why\n    c as other,\n)\n", {"b", "c"}),
        ("def f():\n    import vitdeploy.b\n    from vitdeploy.sub import name\n", {"b", "sub"}),
        ("if TYPE_CHECKING:\n    from vitdeploy.b import B\n\n    import vitdeploy.c\nimport vitdeploy.d\n", {"d"}),
        ('TABLE = {"x": "vitdeploy.b:ROW"}\nWORKER = "vitdeploy.c"\nGROUP = "vitdeploy.sub"\n', {"b", "c"}),
        ('CODE = "vitdeploy.sub:CODE"\nFOLDER = "vitdeploy.b.json"\n', {"sub"}),
        ("from vitdeploy_toy import b\nimport json\n", set()),
    ],
)
def test_an_import_counts_wherever_it_runs(tmp_path, text, found):
    modules = modules_in(write(tmp_path))
    assert imports(text, modules) == {f"vitdeploy.{name}" for name in found} == parsed(text, modules)


def test_a_module_without_its_source_has_no_digest(tmp_path):
    with pytest.raises(KeyError):
        source_digest(["vitdeploy.b", "vitdeploy.absent"], write(tmp_path))


CHAIN = {"b": "from vitdeploy import c\n", "c": "from vitdeploy import b\n\nx = 1\n"}


def test_the_digest_is_of_all_that_is_imported_and_of_nothing_else(tmp_path):
    def digest(name, **texts):
        return source_digest(["vitdeploy.b", "elsewhere.b"], write(tmp_path / name, **{**CHAIN, **texts}))

    same = digest("first")
    assert same == digest("not imported", d="x = 1\n") == digest("the door", __init__="from vitdeploy import d\n")
    changed = [digest("value", c="from vitdeploy import b\n\nx = 2\n"), digest("import", c="import vitdeploy.d\n")]
    assert len({same, *changed}) == 3


def test_the_digest_of_fixed_sources_never_changes(tmp_path):
    """Wherever they lie, whatever their line endings."""
    windows = {name: text.replace("\n", "\r\n") for name, text in CHAIN.items()}
    for name, texts in {"unix": CHAIN, "windows": windows}.items():
        digest = source_digest(["vitdeploy.c", "vitdeploy.b"], write(tmp_path / name, **texts))
        assert digest == "d9f9ae98f548f67fe89904cd94b3c72f91994cfed5513cca04524929982173b2"
