"""Recipes: what loads, what is refused with which line, and that no file makes the reader fail otherwise."""

import copy
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import vitdeploy
from vitdeploy.compilation.backend import BuildOptions
from vitdeploy.errors import MissingFileError, RecipeError, VitdeployError
from vitdeploy.graph.passes.optimize import OptimizeOptions
from vitdeploy.models.source import Source
from vitdeploy.pipeline.job import at_sizes, choice_of, export_config_of, overrides_of, rewrites_of, source_of
from vitdeploy.recipe.load import MAX_BYTES, MAX_PROBLEMS, given_recipe, load_recipe, validate
from vitdeploy.runtime.tasks.depth import DepthSpec
from vitdeploy.runtime.tasks.detection import PostprocessSpec
from vitdeploy.runtime.tasks.image_to_image import ImageSpec
from vitdeploy.runtime.tasks.instance_segmentation import InstanceSpec
from vitdeploy.runtime.tasks.keypoints import KeypointSpec
from vitdeploy.runtime.tasks.regression import RegressionSpec
from vitdeploy.runtime.tasks.segmentation import SegmentationSpec
from vitdeploy.spec import Budget, PreprocessSpec
from vitdeploy.stages.reference_model import Overrides
from vitdeploy.tasks.adapter import DataChoice
from vitdeploy.yaml_values import MAX_DEPTH, MAX_VALUES

# Of thousands of digits, in every base that YAML 1.1 has.
BASES = (("", "7"), ("0x", "f"), ("0b", "1"), ("0", "7"), ("1", ":59"))
LONG_NUMBERS = [prefix + 5000 * digit for prefix, digit in BASES]
LONG_NUMBERS += ["-0x" + 5000 * "f", "1" + 5000 * ":59" + ".5", 5000 * "7" + ".5e+3"]
RECIPES = sorted((Path(vitdeploy.__file__).parents[1] / "recipes").glob("*.yaml"))
EXAMPLE = """
vitdeploy: 1
name: vit-base
source:
  {model: vit_base_patch16_224, checkpoint: weights.safetensors, image_size: [224, 256], heads: 12, labels: names.txt,
   text_features: text.npy}
postprocess:
  {scores: sigmoid, boxes: xyxy, threshold: 0.3, things: [0, 2], mask_threshold: 0.4, overlap: 0.7, top_k: 50}
preprocess: {resize: 248, crop: 224, interpolation: bicubic, mean: [0.5, 0.5, 0.5], std: [0.5, 0.5, 0.5]}
data:
  path: images
  labels: folders
  annotations: labels
  calibration: {images: 128}
  evaluation: {images: all}
  seed: 7
export: {opset: 20, batch: dynamic, preprocess: true}
optimize:
  {class_token_only: false, fold_layer_scale: false, fold_attention_scale: true, drop_key_bias: true,
   fold_value_bias: true, fold_image_normalisation: true, qkv: merged, token_merging: none}
precision: int8
targets: [openvino-cpu, onnxruntime-cpu]
budget: {max_drop: 1, min_agreement: 98.5}
bench: {scenarios: [single, offline], batch: [1, 8], duration: 10}
tensorrt:
  {profiles: [[1, 1, 1], [1, 8, 32]], workspace: 2048, builder_optimization_level: 5,
   hardware_compatibility_level: ampere+, version_compatible: true}
"""
LEAST = "vitdeploy: 1\nname: x\nsource: {model: m}\ndata: {path: d}\ntargets: [openvino-cpu]\n"


@pytest.fixture
def load(tmp_path):
    """Load these bytes, or this text, as a recipe file."""

    def load(content, *overrides):
        path = tmp_path / "recipe.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return load_recipe(path, overrides)

    return load


@pytest.fixture
def problems(load):
    """The problems of a recipe that must be refused."""

    def problems(content, *overrides):
        with pytest.raises(RecipeError) as caught:
            load(content, *overrides)
        assert caught.value.exit_code == 2
        return caught.value.problems

    return problems


def changed(path, value):
    """The values of EXAMPLE with the one at `path` set."""
    data = yaml.safe_load(EXAMPLE)
    *sections, last = path.split(".")
    at = data
    for section in sections:
        at = at[section]
    at[last] = value
    return data


def test_the_example_with_every_section_loads(load, tmp_path):
    recipe = load(EXAMPLE)
    assert source_of(recipe) == Source(
        model="vit_base_patch16_224",
        checkpoint=tmp_path / "weights.safetensors",
        image_size=(224, 256),
        heads=12,
        text_features=tmp_path / "text.npy",
    )
    assert overrides_of(recipe) == Overrides(
        recipe.preprocess.to_spec(),
        PostprocessSpec("sigmoid", "xyxy", 0.3, (0, 2), 0.4, 0.7, 50),
        tmp_path / "names.txt",
    )
    assert choice_of(recipe) == DataChoice(tmp_path / "images", "folders", tmp_path / "labels", 128, "all", 7)
    assert recipe.preprocess.to_spec() == PreprocessSpec(248, (224, 224), "bicubic", (0.5,) * 3, (0.5,) * 3)
    assert (recipe.data.calibration.images, recipe.data.evaluation.images, recipe.data.seed) == (128, "all", 7)
    assert rewrites_of(recipe.optimize) == OptimizeOptions(class_token_only=False, fold_layer_scale=False, qkv="merged")
    assert recipe.targets == ("openvino-cpu", "onnxruntime-cpu")
    assert recipe.to_budget() == Budget(max_drop=1.0, min_agreement=98.5)
    assert (recipe.bench.scenarios, recipe.bench.batch, recipe.engine_batch) == (("single", "offline"), (1, 8), 1)
    export = export_config_of(recipe)
    assert (export.name, export.opset, export.batch, export.in_graph) == ("vit-base", 20, None, True)


def test_the_least_recipe_has_the_documented_defaults(load):
    recipe = load(LEAST)
    assert (recipe.precision, recipe.export.opset, recipe.data.labels) == ("int8", 20, "folders")
    assert recipe.vnni == "auto"
    assert (source_of(recipe), overrides_of(recipe), recipe.to_budget()) == (Source("m"), Overrides(), Budget())
    assert rewrites_of(recipe.optimize) == OptimizeOptions()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_recipe_that_is_shipped_loads(path):
    assert load_recipe(path).name.replace("-", "_") == path.stem


def test_a_recipe_cannot_be_changed_after_it_was_checked(load):
    recipe = load(LEAST)
    with pytest.raises(ValueError, match="frozen"):
        recipe.name = "y"


def test_all_problems_are_told_at_once_each_with_its_path(problems):
    found = problems(
        EXAMPLE.replace("precision: int8", "precision: int3")
        .replace("seed: 7", "seed: -1")
        .replace("openvino-cpu, ", "openvino-tpu, ")
        .replace("name: vit-base", "nam: vit-base")
    )
    assert [problem.split(":")[0] for problem in found] == [
        "$.name",
        "$.data.seed",
        "$.precision",
        "$.targets",
        "$.nam",
    ]
    assert found[0] == "$.name: missing"
    assert "'fp32', 'fp16', 'bf16', 'fp8', 'int8', 'mixed' or 'int4' (found 'int3')" in found[2]


@pytest.mark.parametrize(
    ("wrong", "path", "meant"),
    [
        (("targets:", "target:"), "$.target", "targets"),
        (("max_drop", "maxdrop"), "$.budget.maxdrop", "max_drop"),
        (("checkpoint:", "chekpoint:"), "$.source.chekpoint", "checkpoint"),
        (("calibration:", "calibraton:"), "$.data.calibraton", "calibration"),
        (("workspace:", "work_space:"), "$.tensorrt.work_space", "workspace"),
        (("qkv:", "align_rows: 200, qkv:"), "$.optimize.align_rows", "split_rows"),
    ],
)
def test_a_misspelt_field_is_named_with_the_one_that_was_meant(problems, wrong, path, meant):
    assert f"{path}: unknown field; did you mean {meant}?" in problems(EXAMPLE.replace(*wrong))


@pytest.mark.parametrize(
    ("line", "path"),
    [
        ("zebra: 1", "$.zebra"),
        ("int: 1", "$.int"),
        ("two words: 1", "$.'two words'"),
        ('"\\e[1m": 1', "$.'\\x1b[1m'"),
    ],
)
def test_a_field_like_no_other_is_named_with_all_that_there_are(problems, line, path):
    [problem] = problems(LEAST + line)
    assert problem.startswith(f"{path}: unknown field; known: vitdeploy, name, source,")


def test_a_misspelt_target_is_named_with_the_one_that_was_meant(problems):
    [problem] = problems(EXAMPLE.replace("openvino-cpu", "openvino-cpo"))
    assert "did you mean openvino-cpu?" in problem


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("vitdeploy", 2),
        ("vitdeploy", True),
        ("name", "../up"),
        ("name", ""),
        ("name", "n" * 65),
        ("source.model", 5),
        ("source.checkpoint", ["a"]),
        ("preprocess.resize", 0),
        ("preprocess.resize", 248.0),
        ("preprocess.crop", [224]),
        ("preprocess.crop", True),
        ("preprocess.interpolation", "cubic"),
        ("preprocess.mean", []),
        ("preprocess.mean", [0.5, 0.5]),
        ("preprocess.std", [0.5, 0.0, 0.5]),
        ("preprocess.std", [0.5, float("inf"), 0.5]),
        ("data.path", None),
        ("data.labels", "file"),
        ("data.calibration.images", True),
        ("data.calibration.images", 0),
        ("data.calibration.images", 1.5),
        ("data.evaluation.images", "some"),
        ("data.seed", -1),
        ("data.seed", 2**32),
        ("export.opset", 17),
        ("export.opset", True),
        ("export.batch", -1),
        ("export.preprocess", "yes"),
        ("optimize.class_token_only", 1),
        ("optimize.qkv", "split"),
        ("source.image_size", 0),
        ("source.image_size", [224]),
        ("source.heads", 0),
        ("source.labels", ["a"]),
        ("source.function", "package.module:function"),
        ("postprocess.threshold", 1.5),
        ("postprocess.scores", "none"),
        ("postprocess.things", [-1]),
        ("data.annotations", 5),
        ("optimize.prune", 0),
        ("optimize.prune", 1),
        ("optimize.prune", "30 %"),
        ("optimize.prune", True),
        ("optimize.prune", None),
        ("optimize.token_merging", "half"),
        ("optimize.token_merging", None),
        ("optimize.token_merging", {}),
        ("optimize.token_merging", [192]),
        ("optimize.token_merging", {"1": 192}),
        ("optimize.token_merging", {1: 192.0}),
        ("optimize.token_merging", {True: 192}),
        ("optimize.token_merging", {1: 0}),
        ("optimize.token_merging", {-1: 192}),
        ("optimize.token_merging", {1: 128, 6: 192}),
        ("optimize.token_merging", {1: 192, 6: 192}),
        ("precision", "INT8"),
        ("vnni", "maybe"),
        ("vnni", 1),
        ("targets", []),
        ("targets", "openvino-cpu"),
        ("targets", ["openvino-cpu", "openvino-cpu"]),
        ("budget.max_drop", float("nan")),
        ("budget.max_drop", -0.1),
        ("budget.max_drop", "1"),
        ("budget.min_agreement", 100.5),
        ("budget.max_latency", 0),
        ("budget.max_size", 1.5),
        ("budget.max_memory", 0),
        ("bench.scenarios", ["server"]),
        ("bench.scenarios", ["single", "server:0"]),
        ("bench.scenarios", ["server:5", "sustain:3s"]),
        ("bench.scenarios", ["single", "single"]),
        ("bench.scenarios", []),
        ("bench.scenarios", ["sustain:10m"]),
        ("bench.scenarios", ["single", "server:many"]),
        ("bench.batch", [1, 2, 3]),
        ("bench.batch", [0]),
        ("bench.duration", 0),
        ("bench.duration", float("nan")),
        ("bench.duration", True),
        ("bench", None),
        ("tensorrt.profiles", []),
        ("tensorrt.profiles", [1, 8, 32]),
        ("tensorrt.profiles", [[1, 8]]),
        ("tensorrt.profiles", [[8, 1, 32]]),
        ("tensorrt.profiles", [[0, 8, 32]]),
        ("tensorrt.workspace", 0),
        ("tensorrt.workspace", "2G"),
        ("tensorrt.builder_optimization_level", 6),
        ("tensorrt.builder_optimization_level", True),
        ("tensorrt.hardware_compatibility_level", "turing"),
        ("tensorrt.version_compatible", 1),
        ("data", []),
    ],
)
def test_a_value_that_does_not_fit_is_refused_at_its_path(path, value):
    with pytest.raises(RecipeError) as caught:
        validate(changed(path, value), "here")
    parent = path.rpartition(".")[0]
    assert all(problem.startswith((f"$.{path}", f"$.{parent}:")) for problem in caught.value.problems)


def test_merged_tokens_are_given_by_block(load, problems):
    recipe = load(EXAMPLE, "optimize.token_merging={6: 128, 1: 192}")
    assert recipe.optimize.token_merging == {1: 192, 6: 128}
    assert rewrites_of(recipe.optimize).token_merging == ((1, 192), (6, 128))
    assert problems(EXAMPLE, "optimize.token_merging=192") == [
        "$.optimize.token_merging: input should be none, or block: tokens to keep, such as {1: 192, 6: 128} "
        "(found '192')"
    ]


def test_key_points_and_pictures_have_sections_of_their_own(load, problems):
    lines = [line for line in EXAMPLE.splitlines() if not line.startswith(("postprocess:", "  {scores:"))]
    points = "\n".join([*lines, "postprocess: {decoding: argmax, threshold: 0.2, skeleton: [[0, 1], [1, 2]]}"])
    assert load(points).postprocess.to_spec() == KeypointSpec("argmax", 11, 0.2, ((0, 1), (1, 2)))
    [even] = problems(points, "postprocess.kernel=4")
    assert even.startswith("$.postprocess: kernel 4: expected an odd number of pixels")
    pictures = points.replace("{decoding: argmax, threshold: 0.2, skeleton: [[0, 1], [1, 2]]}", "{black: -1, white: 1}")
    assert load(pictures).postprocess.to_spec() == ImageSpec(-1.0, 1.0)
    [none] = problems(pictures, "postprocess.white=-2")
    assert none.startswith("$.postprocess: black -1.0 and white -2.0: expected white above black")
    [unknown] = problems(points, "postprocess.skeletn=[]")
    assert unknown == "$.postprocess.skeletn: unknown field; did you mean skeleton?"
    head = "postprocess: {candidates: queries, mask_size: [64, 96], enlarge: bilinear}"
    instances = "\n".join([*lines, head])
    assert load(instances).postprocess.to_spec() == InstanceSpec("softmax", "queries", (64, 96), "bilinear", 0.5)
    [beyond] = problems(instances, "postprocess.threshold=2")
    assert beyond.startswith("$.postprocess.threshold: ")


def test_a_bench_may_also_ask_as_a_server_is_asked(load):
    recipe = load(EXAMPLE, "bench.scenarios=[offline,server:50,sustain:10m]")
    assert recipe.bench.scenarios == ("offline", "server:50", "sustain:10m")


def test_a_fixed_batch_must_be_that_of_the_bench(problems, load):
    assert "bench.batch must be [4]" in problems(EXAMPLE, "export.batch=4")[0]
    assert export_config_of(load(EXAMPLE, "export.batch=4", "bench.batch=[4]")).batch == 4


def test_tensorrt_builds_as_the_recipe_says(load):
    assert load(EXAMPLE).to_build() == BuildOptions(((1, 1, 1), (1, 8, 32)), (), 2048 << 20, 5, "ampere+", "newer")
    assert load(EXAMPLE, "tensorrt={}", "bench.batch=[2,16]").to_build() == BuildOptions(((2, 2, 2), (1, 16, 16)))


def test_profiles_hold_every_batch_that_is_measured(load, problems):
    native = ("targets=[tensorrt]", "precision=fp16")
    assert load(EXAMPLE, *native).tensorrt.holds(32)
    assert (
        "no profile of tensorrt.profiles includes bench.batch 64" in problems(EXAMPLE, *native, "bench.batch=[1,64]")[0]
    )
    fixed = problems(EXAMPLE, *native, "export.batch=4", "bench.batch=[4]")[0]
    assert "export.batch is fixed to 4, so tensorrt.profiles must be left out" in fixed
    assert load(EXAMPLE, "bench.batch=[1,64]").targets == ("openvino-cpu", "onnxruntime-cpu")  # which do not read it


@pytest.mark.parametrize(
    "content",
    [b"\xef\xbb\xbf" + EXAMPLE.encode(), EXAMPLE.replace("\n", "\r\n").encode()],
    ids=["BOM", "CRLF"],
)
def test_what_editors_on_windows_write_is_accepted(load, content):
    assert load(content) == load(EXAMPLE)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "found NoneType, expected a mapping"),
        ("- vitdeploy: 1\n- name: x\n", "found list, expected a mapping"),
        ("just text", "found str, expected a mapping"),
        ("a: [1", "not YAML"),
        ("a: 1\n---\nb: 2\n", "not YAML"),
        (LEAST + "name: y\n", "duplicate key name in line 1"),
        (LEAST + "bench: {batch: [1], batch: [8]}\n", "duplicate key batch in line 6"),
        (LEAST + "bench: &b {batch: [1]}\nbudget: *b\n", "aliases are not allowed"),
        (LEAST + "x: !!python/object/apply:os.system [echo]\n", "python/object/apply:os.system"),
        (LEAST + "x: !!python/name:os.system\n", "python/name:os.system"),
        (LEAST + "x: 2001-13-45\n", "month must be in 1..12"),
        (LEAST + "x: !!int many\n", "not YAML"),
        (LEAST + "x: !!bool maybe\n", "not YAML"),
        (LEAST + "x: !!timestamp soon\n", "not YAML"),
        (LEAST + "? [a, b]\n: c\n", "unhashable key"),
        ("a: " + (MAX_DEPTH + 1) * "[" + (MAX_DEPTH + 1) * "]", f"nested deeper than {MAX_DEPTH}"),
        ("a: " + 100_000 * "{a: ", f"nested deeper than {MAX_DEPTH}"),
        (LEAST + "#" * MAX_BYTES, "expected at most 1,048,576"),
        (b"name: \xff\n", "not UTF-8 at byte 6"),
        (EXAMPLE.encode("utf-16"), "not UTF-8"),
        ("name: \x00\n", "not YAML"),
        *((LEAST + f"x: {number}\n", "a number of") for number in LONG_NUMBERS),
        (LEAST + f'x: !!int "{"7" * 5000}"\n', "a number of 5,000 characters in line"),
        ("[" + (MAX_BYTES // 2 - 1) * "a,", f"more than {MAX_VALUES:,} values"),
        (MAX_BYTES // 5 * "a: 1\n", f"more than {MAX_VALUES:,} values"),
        (MAX_BYTES // 2 * "-\n", f"more than {MAX_VALUES:,} values"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(problems, content, why):
    [problem] = problems(content)
    assert problem.startswith("$: ")
    assert why in problem


def test_refusing_an_object_runs_nothing(problems, tmp_path):
    witness = tmp_path / "ran"
    problems(LEAST + f"x: !!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path [{witness}]]\n")
    assert not witness.exists()


def test_a_missing_recipe_is_named(tmp_path):
    with pytest.raises(MissingFileError, match=r"no recipe at .*absent\.yaml"):
        load_recipe(tmp_path / "absent.yaml")


def test_paths_are_those_beside_the_recipe(load, tmp_path):
    recipe = load(EXAMPLE.replace("path: images", "path: ../images"))
    assert recipe.source.checkpoint == str(tmp_path / "weights.safetensors")
    assert recipe.data.path == str(tmp_path / "../images")


def test_a_model_is_a_path_beside_the_recipe_where_it_is_a_graph_or_a_folder_that_is_there(load, tmp_path):
    (tmp_path / "folder").mkdir()
    expected = {
        "theirs.onnx": str(tmp_path / "theirs.onnx"),
        "/models/theirs.onnx": "/models/theirs.onnx",
        "hf:folder": f"hf:{tmp_path / 'folder'}",
        "hf:owner/name": "hf:owner/name",
        "timm:vit_tiny_patch16_224": "timm:vit_tiny_patch16_224",
        "vit_tiny_patch16_224": "vit_tiny_patch16_224",
    }
    for model, found in expected.items():
        assert load(LEAST.replace("{model: m}", f'{{model: "{model}"}}')).source.model == found


def test_several_image_sizes_are_as_many_recipes(load):
    recipe = load(LEAST.replace("{model: m}", "{model: m, image_sizes: [224, [192, 256]]}"))
    assert [source_of(each).image_size for each in at_sizes(recipe)] == [(224, 224), (192, 256)]
    assert all(validate(each.model_dump(mode="json"), "") == each for each in at_sizes(recipe))
    one = load(LEAST)
    assert at_sizes(one) == (one,)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            "image_size: 32, image_sizes: [32, 64]",
            "$.source: has both image_size and image_sizes; leave one of them out",
        ),
        ("image_sizes: [32, [32, 32]]", "$.source: image_sizes repeats a size"),
        ("image_sizes: []", "$.source.image_sizes: "),
        ("image_sizes: [32, 0]", "$.source.image_sizes[1]: "),
    ],
)
def test_image_sizes_that_make_no_sense_are_refused(problems, sizes, message):
    found = problems(LEAST.replace("{model: m}", f"{{model: m, {sizes}}}"))
    assert found[0].startswith(message)


def test_a_source_that_names_nothing_is_refused(problems):
    [problem] = problems(LEAST.replace("{model: m}", "{heads: 3}"))
    assert problem.startswith("$.source: needs a model or a checkpoint")


def test_absolute_paths_and_the_home_folder_stay(load, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    recipe = load(EXAMPLE.replace("path: images", "path: /data").replace("weights.safetensors", "~/w.pt"))
    assert (recipe.data.path, recipe.source.checkpoint) == ("/data", str(tmp_path / "home" / "w.pt"))


def test_the_home_of_a_user_that_there_is_not_is_a_plain_name(load, tmp_path):
    recipe = load(EXAMPLE.replace("path: images", "path: ~nobody-of-this-name/x"))
    assert recipe.data.path == str(tmp_path / "~nobody-of-this-name/x")


def test_overrides_take_yaml_values_and_paths_of_the_working_folder(load):
    recipe = load(
        EXAMPLE, "budget.max_drop=0.5", "targets=[onnxruntime-cpu]", "data.path=d", "source.checkpoint=null", "name=a"
    )
    assert (recipe.budget.max_drop, recipe.targets, recipe.data.path) == (0.5, ("onnxruntime-cpu",), "d")
    assert (recipe.source.checkpoint, recipe.name) == (None, "a")


def test_an_override_makes_the_section_that_is_missing(load):
    assert load(LEAST, "bench.duration=3").bench.duration == 3


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("name", "expected a.b=value"),
        ("=x", "expected a.b=value"),
        ("a..b=x", "expected a.b=value"),
        ("name.first=x", "$.name is not a mapping"),
        ("targets.0=x", "$.targets is not a mapping"),
        ("name=[x", "--set 'name=[x': while parsing"),
        ("name=2001-13-45", "month must be in 1..12"),
        ("data.seed=&a [*a]", "aliases are not allowed"),
        ("name=" + 5000 * "[", "nested deeper than"),
        ("name=!!python/name:os.system", "python/name:os.system"),
        ("data.sed=1", "$.data.sed: unknown field; did you mean seed?"),
        ("targets=openvino-cpu", "$.targets: input should be a list, such as [openvino-cpu] (found 'openvino-cpu')"),
        ("budget=1", "$.budget: input should be a section with the fields max_drop, min_agreement, max_latency"),
        ("data.seed=-1", "$.data.seed: input should be greater than or equal to 0 (found '-1')"),
    ],
)
def test_a_wrong_override_is_named(problems, override, why):
    [problem] = problems(EXAMPLE, override)
    assert why in problem


def test_overrides_leave_the_values_of_other_recipes_alone(load):
    before = load(EXAMPLE)
    load(EXAMPLE, "data.seed=9")
    assert load(EXAMPLE) == before


# Pieces that a recipe is made of, and pieces that break one.
WORDS = (
    "vitdeploy name source data targets bench path openvino-cpu 1 true null .nan .inf -1 0x_ 2001-13-45 1:99 ~x/y = <<"
)
MARKS = "&a *a !!int !!bool !!timestamp !!set !!omap !!pairs !!binary !!map !x % ? # - |\n >\n ---\n ...\n"
PIECES = st.sampled_from(
    [
        *WORDS.split(),
        *(f"{mark} " for mark in MARKS.split(" ")),
        *(": ", ":", "\n", "\n  ", "[", "]", "{", "}", ",", "'", '"', "\t", "\x00", "\x85", "é", "\ud7ff", "9" * 5000),
    ]
)


@settings(deadline=None, max_examples=300)
@given(st.lists(PIECES, max_size=25).map("".join), st.sampled_from(["", LEAST, EXAMPLE]))
def test_no_text_raises_anything_but_an_error_of_ours(tmp_path_factory, text, start):
    path = tmp_path_factory.getbasetemp() / "random.yaml"
    path.write_bytes((start + text).encode("utf-8"))
    try:
        load_recipe(path, [f"name={text}", f"{text[:9]}=1"])
    except VitdeployError as error:
        assert error.exit_code == 2


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=60))
def test_no_bytes_raise_anything_but_an_error_of_ours(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "random.yaml"
    path.write_bytes(content)
    with pytest.raises(RecipeError):
        load_recipe(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [
    (name, key)
    for name, section in yaml.safe_load(EXAMPLE).items()
    for key in (section if isinstance(section, dict) else [None])
]


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(FIELDS), JSON)
def test_no_value_in_a_field_raises_anything_but_a_recipe_error(field, value):
    data = copy.deepcopy(yaml.safe_load(EXAMPLE))
    section, key = field
    (data if key is None else data[section])[section if key is None else key] = value
    try:
        assert validate(data, "here").vitdeploy == 1
    except RecipeError as error:
        assert all(problem.startswith("$") for problem in error.problems)


def test_a_rotation_of_the_residual_stream(load):
    assert not rewrites_of(load(EXAMPLE).optimize).rotate_residual
    assert rewrites_of(load(EXAMPLE, "optimize.rotate_residual=true").optimize).rotate_residual


def test_a_recipe_that_was_read_takes_no_overrides():
    recipe = load_recipe(RECIPES[0])
    assert given_recipe(recipe) is recipe
    with pytest.raises(RecipeError, match=r"overrides precision=fp32: not possible on a loaded recipe"):
        given_recipe(recipe, ["precision=fp32"])


def test_post_processing_is_that_of_the_fields_that_it_has(load, problems):
    for fields, spec in (
        ("{reduce_labels: true, ignore: 0}", SegmentationSpec(ignore=0, reduce_labels=True)),
        ("{values: metric, max_depth: 20.0}", DepthSpec("metric", max_depth=20.0)),
        ("{threshold: 0.2}", PostprocessSpec(threshold=0.2)),
        ("{tolerance: 2}", RegressionSpec(tolerance=2.0)),
        ("{units: [years, kg], tolerance: [2, 0.5]}", RegressionSpec(("years", "kg"), (2.0, 0.5))),
    ):
        assert load(LEAST, f"postprocess={fields}").postprocess.to_spec() == spec
    told = problems(LEAST, "postprocess={values: metric, resize: bilinear, threshold: 0.2}")
    assert told == ["$.postprocess.threshold: unknown field; known: values, resize, max_depth"]
    told = problems(LEAST, "postprocess={ignore: -1, mask_size: [0, 4]}")
    assert [line.partition(":")[0] for line in told] == ["$.postprocess.mask_size[0]", "$.postprocess.ignore"]


def test_a_problem_is_told_in_a_short_line(problems):
    # With ?, as a key without it has 1,024 characters at most.
    source = f"{{model: {'m' * 100_000}, ? {'k' * 100_000} : 1, task: {'t' * 100_000}}}"
    told = problems(LEAST.replace("{model: m}", source))
    assert len(told) == 3 and all(len(line) < 1100 for line in told)
    [told] = problems(LEAST, f"data.path={'p' * 5000}")
    assert told == f"$.data.path: string should have at most 4096 characters (found '{'p' * 60}')"


@pytest.mark.parametrize("override", ["x" * 100_000, f"name.{'k' * 100_000}.a=1", f"name={'[' + 'x' * 100_000}"])
def test_a_long_override_is_not_told_whole(problems, override):
    [told] = problems(EXAMPLE, override)
    assert told.startswith(f"--set '{override[:199]}...: ") and len(told) < 700


def test_the_first_problems_of_very_many_are_told(load):
    with pytest.raises(RecipeError, match=r"recipe\.yaml: 1,000 problems") as caught:
        load(LEAST + "".join(f"k{number}: 1\n" for number in range(1000)))
    assert len(caught.value.problems) == MAX_PROBLEMS and "and 900 more\n" in str(caught.value)


def test_a_long_path_is_not_told_whole():
    with pytest.raises(MissingFileError, match=r"no recipe at n{1000}(?!n)"):
        load_recipe(Path("n" * 100_000))
