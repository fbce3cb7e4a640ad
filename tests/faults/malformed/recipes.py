"""300 recipes: YAML that is none or grows, fields of other types and absurd values, names that lead elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.faults.malformed import bytewise, places, trees
from tests.faults.malformed.kinds import Attempt, Kind, Table, in_turns
from tests.faults.seeds import BUILT_IN, Seeds

FILE = "given/recipe.yaml"
PLAN = ("run", FILE, "--dry-run", "-o", "out")
EXPORT = ("export", FILE, "-o", "out")
RECIPES = Table()


def document_of(seeds: Seeds) -> dict[str, Any]:
    """A recipe that runs, with every section."""
    return {
        "vitdeploy": 1,
        "name": "tiny",
        "source": {"model": BUILT_IN, "checkpoint": str(seeds.safetensors)},
        "preprocess": {"resize": 32, "crop": 32, "mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic"},
        "data": {
            "path": str(seeds.images),
            "labels": "folders",
            "calibration": {"images": 4},
            "evaluation": {"images": 4},
            "seed": 0,
        },
        "export": {"opset": 20, "batch": "dynamic", "preprocess": True},
        "optimize": {"class_token_only": True, "token_merging": "none"},
        "precision": "int8",
        "targets": ["onnxruntime-cpu"],
        "budget": {"max_drop": 2.0, "min_agreement": 50.0},
        "bench": {"scenarios": ["single"], "batch": [1], "duration": 1},
        "bundle": {"include_failed": False},
        "tensorrt": {},
    }


def case(name: str, *, must_refuse: bool = False) -> Callable[[trees.Change], trees.Change]:
    """A class of recipes: (chance, document) -> another, or text. JSON is YAML."""

    def added(change: trees.Change) -> trees.Change:
        @RECIPES.add(name, must_refuse=must_refuse)
        def make(attempt: Attempt) -> None:
            found = change(attempt.random, document_of(attempt.seeds))
            attempt.write("recipe.yaml", found if isinstance(found, bytes | str) else yaml_of(found))

        return change

    return added


def yaml_of(document: dict[str, Any]) -> str:
    """A section a line, each as JSON: what `json` calls Infinity and NaN is `.inf` and `.nan` here."""
    lines = [f"{json.dumps(str(key))}: {json.dumps(value)}" for key, value in document.items()]
    return "\n".join(lines).replace("Infinity", ".inf").replace("NaN", ".nan") + "\n"


def put(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The document with another value at "section.field"."""
    *sections, key = path.split(".")
    at = document
    for section in sections:
        at = at.setdefault(section, {})
    at[key] = value
    return document


def text_with(document: dict[str, Any], line: str) -> str:
    """The document's text, and a line of any YAML behind it."""
    return yaml_of(document) + line + "\n"


trees.add_each(case, yaml_of)
case("another file", must_refuse=True)(lambda chance, document: bytewise.another_file(chance, b""))


# --- YAML: yaml.org/spec/1.1 ------------------------------------------------------------------------------------------


@case("tags that would run something", must_refuse=True)
def _tags(chance, document):
    mark = "executed"  # in the working folder
    line = chance.choice(
        (
            f"name: !!python/object/apply:os.system ['touch {mark}']",
            f'name: !!python/object/new:os.system ["touch {mark}"]',
            f"name: !!python/object/apply:builtins.open ['{mark}', 'w']",
            "name: !!python/name:os.system",
            "name: !!python/module:os",
            "name: !!python/object:object {}",
            f"name: !!python/object/apply:builtins.eval [\"open('{mark}', 'w')\"]",
            "name: !ruby/object:Gem::Installer {i: x}",
            "name: !!binary aGVsbG8=",
            "name: !<tag:yaml.org,2002:python/tuple> [a]",
            "name: !!set {a, b}",
            "name: !!omap [a: 1]",
        )
    )
    del document["name"]
    return text_with(document, line)


@case("aliases that grow", must_refuse=True)
def _aliases(chance, document):
    depth = chance.choice((3, 10, 100))
    lines = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, depth)]
    return chance.choice((text_with(document, "\n".join(lines)), text_with(document, "a: &a [*a]"), "&a {? *a : 1}"))


@case("merges, directives, several documents")
def _yaml_features(chance, document):
    text = yaml_of(document)
    return chance.choice(
        (
            "%YAML 9.9\n---\n" + text,
            "%TAG ! tag:evil,2000:\n---\n" + text,
            "---\n" + text + "---\n" + text,
            text + "...\njunk",
            "<<: {name: other}\n" + text,
            "<<: [{name: other}, 7]\n" + text,
            "? {a: 1}\n: 2\n" + text,
            "? [a]\n: 2\n" + text,
            "? \n: \n" + text,
            "\t" + text,
            text.replace("\n", "\r\n"),
            text.replace("\n", "\u2028"),
            "=: 1\n" + text,
        )
    )


@case("deep YAML", must_refuse=True)
def _deep(chance, document):
    depth = chance.choice((33, 500, 20_000, 400_000))
    return chance.choice(
        (
            "[" * depth,
            "{a: " * min(depth, 200_000),
            "- " * depth,
            "[" * depth + "]" * depth,
            "".join(f"{' ' * i}a:\n" for i in range(min(depth, 1000))),
            "? " * depth,
        )
    )[:1_040_000]


@case("a megabyte of one thing", must_refuse=True)
def _megabyte(chance, document):
    size = 1_040_000
    return chance.choice(
        (
            "[" + "1," * (size // 2) + "1]",
            "- a\n" * (size // 4),
            "a: 1\n" * (size // 5),
            "".join(f"k{i}: 1\n" for i in range(size // 11)),
            "{" + ",".join(f"k{i}" for i in range(size // 8)) + "}",
            "name: " + "x" * size,
            "name: '" + "''" * (size // 2) + "'",
            'name: "' + "\\u0041" * (size // 6) + '"',
            "#" * size,
            "\n" * size,
            "name: |\n" + " x\n" * (size // 3),
            "!!a " * (size // 4),
            "&a " * (size // 3),
            "[" + "[]," * (size // 3) + "1]",
            "x" * (2 << 20),
        )
    )


@case("numbers of very many digits")
def _digits(chance, document):
    count = chance.choice((20, 400, 4301, 100_000, 1_000_000))
    number = chance.choice(("9" * count, "0x" + "f" * count, "0b" + "1" * count, "0" + "7" * count, "1:" * count + "1"))
    number = chance.choice((number, "-" + number, number + ".0", "1e" + "9" * min(count, 400), "." + "9" * count))
    place = chance.choice(("vitdeploy", "name", "high_precision"))
    del document["vitdeploy"]
    return text_with(
        {**document, "vitdeploy": 1} if place != "vitdeploy" else document, f"{place}: {number[:1_000_000]}"
    )


@case("dates, times and other words of YAML")
def _words(chance, document):
    words = (
        "2001-13-45",
        "2001-01-01T99:99:99Z",
        "1:99",
        "~",
        "null",
        "yes",
        "off",
        ".inf",
        ".NAN",
        "0o8",
        "0b2",
        "1__0",
        "-",
    )
    field = chance.choice(("name", "precision", "vnni", "high_precision", "vitdeploy"))
    document.pop(field, None)
    return text_with(document, f"{field}: {chance.choice(words)}")


# --- values -----------------------------------------------------------------------------------------------------------


@case("odd names of the model", must_refuse=True)
def _model(chance, document):
    names = (
        *places.ODD_NAMES[4:],
        "vit_w9999999d99h9_patch1_9999",
        "vit_w32d999999h2_patch8_32",
        "vit_w0d0h0_patch0_0",
        "vit_w32d2h3_patch8_32",
        "vit_w32d2h2_patch8_" + "9" * 5000,
        "hf:" + "x" * 5000,
        "hf:../../etc",
        "hf:/proc/self",
        "timm:",
        "timm:x" * 2000,
        "hf:",
        "os:system",
        "absent.onnx",
        "x" * 300 + ".onnx",
        "/dev/zero.onnx",
        "a\0.onnx",
    )
    document["source"].pop("checkpoint")
    return put(document, "source.model", chance.choice(names))


@case("odd names of files", must_refuse=True)
def _files(chance, document):
    field = chance.choice(("source.checkpoint", "source.labels", "data.path", "source.text_features", "source.normal"))
    return put(document, field, chance.choice((*places.ODD_NAMES, "/dev/null", "/proc/self/fd/0", "~nobody_at_all/x")))


def _at(*places_: tuple[str, Any]) -> trees.Change:
    return lambda chance, document: put(document, *chance.choice(places_))


case("absurd sizes of images", must_refuse=True)(
    _at(
        *(
            (f"preprocess.{key}", value)
            for key in ("crop", "resize")
            for value in (0, -1, 10**9, 10**30, 1.5, [32], "32", True)
        ),
        ("source.image_size", 10**6),
        ("source.image_size", [32, 10**9]),
        ("source.image_sizes", [32, 32]),
        ("source.image_sizes", []),
        ("preprocess.mean", [0.5] * 4),
        ("preprocess.std", [0.0] * 3),
        ("preprocess.std", [float("nan")] * 3),
        ("preprocess.mean", [float("inf")] * 3),
        ("preprocess.interpolation", "cubist"),
    )
)
case("absurd counts", must_refuse=True)(
    _at(
        ("data.calibration.images", 0),
        ("data.calibration.images", -5),
        ("data.calibration.images", "many"),
        ("data.evaluation.images", 0),
        ("data.seed", -1),
        ("data.seed", 2**32),
        ("bench.duration", 1e9),
        ("bench.duration", float("nan")),
        ("bench.duration", -1),
        ("bench.batch", []),
        ("bench.batch", [0]),
        ("bench.batch", [1, 2, 3]),
        ("bench.scenarios", ["single"] * 5),
        ("bench.scenarios", ["server:1e999"]),
        ("bench.scenarios", ["x" * 5000]),
        ("budget.max_drop", float("nan")),
        ("budget.max_drop", -1),
        ("budget.min_agreement", 101),
        ("budget.max_latency", 0),
        ("high_precision", float("inf")),
    )
)
case("counts beyond all that there is")(
    _at(
        ("data.calibration.images", 10**12),
        ("data.evaluation.images", 10**30),
        ("bench.batch", [10**9]),
        ("bench.batch", [1, 10**30]),
        ("export.batch", 10**9),
        ("source.heads", 10**9),
        ("source.heads", 3),
        ("budget.max_size", 10**30),
        ("optimize.token_merging", {0: 10**9}),
        ("optimize.split_rows", [10**9, 1]),
        ("optimize.prune", 0.999999),
    )
)
case("targets and precisions that there are not", must_refuse=True)(
    _at(
        ("targets", []),
        ("targets", ["onnxruntime-cpu"] * 2),
        ("targets", ["\x1b[2J"]),
        ("targets", ["x" * 5000]),
        ("targets", [None]),
        ("targets", "onnxruntime-cpu"),
        ("targets", [["onnxruntime-cpu"]]),
        ("targets", [f"t{i}" for i in range(5000)]),
        ("precision", "int3"),
        ("precision", None),
        ("accept_known_bad", ["none"]),
    )
)
case("names that are no names", must_refuse=True)(
    lambda chance, document: put(
        document, "name", chance.choice(("", "../x", "a/b", "\x1b[2J", "x" * 65, ".", " a", 7, None, ["a"]))
    )
)
case("layers to leave out")(
    _at(
        ("ignore", ["*" * 5000]),
        ("ignore", ["(a+)+$" * 50]),
        ("ignore", ["["] * 5000),
        ("ignore", ["\x1b[2J"]),
        ("ignore", [""]),
        ("float_parts", ["x" * 5000]),
        ("float_parts", ["none"]),
    )
)
case("post-processing of another task")(
    lambda chance, document: {
        **document,
        "postprocess": chance.choice((*trees.VALUES, {"scores": "none"}, {"top_k": 10**30})),
    }
)
case("what belongs to other back ends")(
    lambda chance, document: {**document, "tensorrt": trees.changed(chance, {"profiles": [{"min": 1}], "workspace": 1})}
)


@case("code, which a recipe cannot name", must_refuse=True)
def _code(chance, document):
    field = chance.choice(
        ("script", "plugins", "function", "source.function", "source.code", "__class__", "data.command")
    )
    return put(document, field, "os:system")


@RECIPES.add("something else in its place", must_refuse=True)
def _place(attempt: Attempt) -> None:
    places.another(attempt.random, attempt.given / "recipe.yaml")


@RECIPES.add("something else in the place of what it names", must_refuse=True)
def _named(attempt: Attempt) -> None:
    attempt.given.mkdir(exist_ok=True)
    places.another(attempt.random, attempt.given / "named")
    field = attempt.random.choice(("source.checkpoint", "source.labels", "data.path"))
    document = put(document_of(attempt.seeds), field, "named")
    attempt.write("recipe.yaml", yaml_of(document))


@RECIPES.add("overrides on the command line", must_refuse=True)
def _overrides(attempt: Attempt) -> None:
    attempt.write("recipe.yaml", yaml_of(document_of(attempt.seeds)))
    odd = (
        "",
        "=",
        "a",
        "a.b",
        "source.model",
        "name.x=1",
        "source=[",
        "name=!!python/name:os.system",
        "a..b=1",
        "x=" + "[" * 5000,
    )
    attempt.words = (*PLAN, "--set", attempt.random.choice((*odd, "name=" + "9" * 5000, ".=1", "vitdeploy=&a [*a]")))


KIND = Kind(
    "recipes",
    full=300,
    damages=tuple(RECIPES),
    words=in_turns(*[PLAN] * 13, EXPORT),
    whole=lambda attempt: attempt.write("recipe.yaml", yaml_of(document_of(attempt.seeds))) and None,
    commands=(PLAN, EXPORT),
)
