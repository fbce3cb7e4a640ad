"""What is shipped: the wheel holds the package and nothing else."""

import ast
import importlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import vitdeploy
from vitdeploy.backends import TARGETS
from vitdeploy.cli.main import EXPORT_MODULES

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "vitdeploy"
SHIPPED = {".py", ".pyi", ".jinja", ".json", ".typed"}
ALL = ["export", "onnxruntime", "openvino", "serve"]  # what the extra `all` stands for
TEXTS = ("vitdeploy", "docs", "tests", "recipes", "examples", "benchmarks")
SITE = PACKAGE / "embed" / "web" / "site"  # files of a page, of whatever kind


def build(kind, root, out):
    """The "wheel" or "sdist" of the project in `root`, built by hatchling in this process, which needs no network."""
    module = pytest.importorskip(f"hatchling.builders.{kind}", reason="pip install hatchling")
    builder = {"wheel": "WheelBuilder", "sdist": "SdistBuilder"}[kind]
    (path,) = getattr(module, builder)(str(root)).build(directory=str(out), versions=["standard"])
    return Path(path)


@pytest.fixture(scope="module")
def wheel_file(tmp_path_factory):
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def wheel(wheel_file):
    with zipfile.ZipFile(wheel_file) as archive:
        yield archive


def sources():
    site = {path for path in SITE.rglob("*") if path.is_file()}
    shipped = site | {path for path in PACKAGE.rglob("*") if path.suffix in SHIPPED}
    return {path.relative_to(ROOT).as_posix() for path in shipped}


def test_the_wheel_holds_every_module_and_template(wheel):
    assert sources() <= set(wheel.namelist())
    assert any(name.endswith(".jinja") for name in sources())
    assert {"vitdeploy/embed/web/site/app/page.js", "vitdeploy/py.typed"} <= sources()


def test_the_wheel_holds_nothing_else(wheel):
    info = f"vitdeploy-{vitdeploy.__version__}.dist-info"
    names = wheel.namelist()
    assert {name.split("/")[0] for name in names} == {"vitdeploy", info}
    assert {name for name in names if name.startswith("vitdeploy/")} == sources()


def test_the_wheel_is_as_small_as_contributors_read(wheel_file, wheel):
    (bound,) = re.findall(r"The wheel has at most ([\d.]+) MB", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert 0.9 * float(bound) < wheel_file.stat().st_size / 1e6 <= float(bound)
    weights = (".onnx", ".data", ".safetensors", ".pt", ".pth", ".bin", ".npz", ".npy", ".engine")
    assert not [name for name in wheel.namelist() if name.endswith(weights) or "tests" in name.split("/")]


def test_the_wheel_has_the_command_and_the_license(wheel):
    info = f"vitdeploy-{vitdeploy.__version__}.dist-info"
    assert "vitdeploy = vitdeploy.cli.watched:main" in wheel.read(f"{info}/entry_points.txt").decode()
    assert f"{info}/licenses/LICENSE" in wheel.namelist()


def test_the_wheel_asks_for_three_packages_and_offers_the_extras(wheel):
    metadata = wheel.read(f"vitdeploy-{vitdeploy.__version__}.dist-info/METADATA").decode()
    required = re.findall(r"^Requires-Dist: (\w+)[^;\n]*$", metadata, re.MULTILINE)
    assert sorted(required) == ["click", "numpy", "pillow"]
    assert set(re.findall(r"^Provides-Extra: (\w+)$", metadata, re.MULTILINE)) == {
        "all",
        "bench",
        "cuda",
        "data",
        "export",
        "models",
        "onnxruntime",
        "openvino",
        "ray",
        "serve",
        "sign",
        "tensorrt",
        "text",
        "tracking",
    }


def test_an_index_takes_the_metadata(wheel):
    """What `twine check` looks at: every field is valid, and the description renders."""
    text = wheel.read(f"vitdeploy-{vitdeploy.__version__}.dist-info/METADATA")
    metadata = Metadata.from_email(text, validate=True)
    assert metadata.description_content_type == "text/markdown"
    assert metadata.description == (ROOT / "README.md").read_text(encoding="utf-8")
    assert metadata.license_expression == "Apache-2.0"


def test_the_sdist_builds_the_same_wheel(wheel_file, tmp_path):
    shutil.unpack_archive(build("sdist", ROOT, tmp_path), tmp_path, filter="data")
    (unpacked,) = (path for path in tmp_path.iterdir() if path.is_dir())
    again = build("wheel", unpacked, tmp_path)
    assert again.name == wheel_file.name
    assert again.read_bytes() == wheel_file.read_bytes()


# Imports every module of a wheel; prints which lack which package.
IMPORTS = """
import importlib, json, pathlib, sys, zipfile
wheel, allowed = sys.argv[1], set(sys.argv[2].split(","))

class Absent:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in allowed | sys.stdlib_module_names and not top.startswith("_sysconfigdata"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
sys.path.insert(0, wheel)
missing = {}
for name in zipfile.ZipFile(wheel).namelist():
    if name.endswith(".py"):
        module = name[:-3].replace("/", ".").removesuffix(".__init__")
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            missing[module] = error.name.partition(".")[0]
assert pathlib.Path(sys.modules["vitdeploy"].__file__).is_relative_to(wheel)
print(json.dumps(missing))
"""


def test_each_module_imports_or_lacks_a_package_of_an_extra(wheel_file, wheel):
    """With numpy, Pillow and click alone."""
    allowed = "vitdeploy,numpy,PIL,click"
    done = subprocess.run([sys.executable, "-c", IMPORTS, wheel_file, allowed], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    missing = json.loads(done.stdout)
    metadata = wheel.read(f"vitdeploy-{vitdeploy.__version__}.dist-info/METADATA").decode()
    _, brought = needed(metadata, ())
    modules = importlib.metadata.packages_distributions()
    unknown = {
        module: package
        for module, package in missing.items()
        if not {canonicalize_name(each) for each in modules.get(package, [])} & brought
    }
    assert unknown == {}
    zone = ("vitdeploy.runtime.", "vitdeploy.compilation.", "vitdeploy.benchmark.", "vitdeploy.devices.agent.")
    assert [module for module in missing if f"{module}.".startswith(zone)] == []
    assert "vitdeploy.models.architectures.vit" in missing


def test_every_folder_of_modules_is_a_package():
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_the_command_of_the_project_file_exists():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    module, function = re.search(r'^vitdeploy = "([\w.]+):(\w+)"$', text, re.MULTILINE).groups()
    assert callable(getattr(importlib.import_module(module), function))


# --- what `make` installs ---------------------------------------------------------------------------------------------

LOCKED = re.compile(r"^([\w.-]+)==([\w.]+)(?: ; ([^\\]+))?")


def locked(name):
    """The pins of a lock file that hold here, and its text."""
    text = (ROOT / "requirements" / name).read_text(encoding="utf-8")
    pins = [LOCKED.match(line) for line in text.splitlines() if LOCKED.match(line)]
    return {pin[1]: pin[2] for pin in pins if pin[3] is None or Marker(pin[3]).evaluate()}, text


def asked(project, extras, groups):
    """What pyproject.toml asks for here, with these extras and dependency groups."""
    texts = list(project["project"]["dependencies"])
    for extra in extras:
        texts += project["project"]["optional-dependencies"][extra]
    for group in groups:
        texts += project["dependency-groups"][group]
    asked_for = [Requirement(text) for text in texts if isinstance(text, str)]
    return [each for each in asked_for if each.marker is None or each.marker.evaluate()]


@pytest.mark.parametrize(
    ("name", "extras", "groups"),
    [
        ("all.txt", ALL, ["build"]),
        (
            "dev.txt",
            [*ALL, "sign", "ray", "data", "tracking"],
            ["build", "test", "lint", "references", "clients", "benchmarks", "docs", "fuzz"],
        ),
    ],
)
def test_lock_files_hold_what_the_project_asks_for(name, extras, groups):
    tomllib = pytest.importorskip("tomllib", reason="a module of Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    versions, _ = locked(name)
    for each in asked(project, extras, groups):
        if each.name != "torch":  # in requirements/torch.txt, without a hash
            assert versions.get(canonicalize_name(each.name), "missing: make lock") in each.specifier, each


@pytest.mark.parametrize("name", ["all.txt", "dev.txt", "lowest.txt"])
def test_lock_files_have_a_hash_for_each_pin_and_name_no_place(name):
    _, text = locked(name)
    entries = re.split(r"\n(?=[a-z])", text)[1:]
    assert len(entries) > 60
    assert [entry for entry in entries if "--hash=sha256:" not in entry] == []
    assert not re.search(r"://|-index|find-links|^-e| @ |/[a-z]+/", text, re.MULTILINE)


# --- what errors and pages say to install ----------------------------------------------------------------------------


def extras(wheel):
    """The distributions that each extra installs, by name of the extra."""
    metadata = wheel.read(f"vitdeploy-{vitdeploy.__version__}.dist-info/METADATA").decode()
    names = re.findall(r"^Provides-Extra: (\w+)$", metadata, re.MULTILINE)
    return {name: needed(metadata, {name})[0] for name in names}


def test_an_error_of_a_missing_package_names_an_extra_that_installs_it(wheel):
    installed = extras(wheel)
    fixes = [(row.package, row.extra) for row in TARGETS.values()]
    # Those with errors of their own are not here: onnxruntime, pycocotools, huggingface_hub.
    distributions = importlib.metadata.packages_distributions()
    fixes += [(distributions[module][0], extra) for module in EXPORT_MODULES for extra in ("export",)]
    for path in PACKAGE.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "MissingPackageError":
                package, extra = call.args[:2]
                if isinstance(extra, ast.Constant) and extra.value and isinstance(package, ast.Constant):
                    fixes.append((package.value, extra.value))
    assert {("pycocotools", "export"), ("pyarrow", "data"), ("wandb", "tracking")} <= set(fixes)
    wrong = [(package, extra) for package, extra in fixes if canonicalize_name(package) not in installed[extra]]
    assert wrong == [("mlflow", "tracking")]  # the module of mlflow-skinny


def test_every_extra_that_a_text_names_exists(wheel):
    known, unknown, named = set(extras(wheel)), [], set()
    for place in (*ROOT.glob("*.*"), *(path for name in TEXTS for path in (ROOT / name).rglob("*.*"))):
        if place.suffix in {".py", ".md", ".toml", ".yaml", ".ipynb", ".sh", ".jinja"}:
            for names in re.findall(r"vitdeploy\[([a-z_,]+)\]", place.read_text(encoding="utf-8")):
                named |= set(names.split(","))
                unknown += [(place.name, name) for name in names.split(",") if name not in known]
    assert unknown == [] and {"all", "data", "openvino"} <= named
    page = (ROOT / "docs" / "get-started.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| extra \|.*?\n\n", page, re.MULTILINE | re.DOTALL)
    first = [row.split("|")[1] for row in table.splitlines()[2:] if row]
    assert sorted(re.findall(r"`(\w+)`", " ".join(first))) == sorted(known)


# --- a device, with one runtime and one extra -------------------------------------------------------------------------

# Runs `vitdeploy` where no module can be imported that the extras do not bring.
WITHOUT = """
import sys
blocked = set(sys.argv.pop(1).split(","))

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from vitdeploy.benchmark import protocol
blocks = {"block_seconds": 0.02, "min_rounds": 3, "warmup": 0.0, "processes": 1, "max_extension": 1}
whole = protocol.Protocol
protocol.Protocol = lambda **fields: whole(**{**fields, **blocks})  # a bench that is over at once
from vitdeploy.cli.main import main
main()
"""


def needed(metadata, extras):
    """The distributions that the package asks for with these extras, and those of all its extras."""
    every, found = set(), set()
    for line in re.findall(r"^Requires-Dist: (.+)$", metadata, re.MULTILINE):
        name = re.match(r"[\w.-]+", line)[0].lower().replace("_", "-")
        extra = re.search(r"extra == ['\"]([\w-]+)", line)
        every.add(name)
        if extra is None or extra[1] in extras:
            found.add(name)
    return with_their_own(found), every


def with_their_own(names):
    """The distributions, and those that they ask for themselves."""
    found, left = set(), list(names)
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        try:
            asked = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # one that is for another system
            continue
        left += [re.match(r"[\w.-]+", line)[0].lower().replace("_", "-") for line in asked if "extra ==" not in line]
    return found


@pytest.mark.parametrize(
    ("extra", "command"),
    [
        ("bench", ("bench", "BUNDLE", "--scenario", "single", "--duration", "0.1")),
        ("bench", ("embed", "BUNDLE", "--as", "cpp", "-o", "OUT")),
    ],
)
def test_a_device_needs_one_runtime_and_the_extra_that_a_command_names(
    extra, command, wheel, small_export, digits, tmp_path, shared_store
):
    from tests.command_line import command_line

    metadata = wheel.read(f"vitdeploy-{vitdeploy.__version__}.dist-info/METADATA").decode()
    brought, every = needed(metadata, {extra, "openvino"})
    modules = importlib.metadata.packages_distributions()
    blocked = [
        module
        for module, names in modules.items()
        if {each.lower().replace("_", "-") for each in names} & (every - brought) and not module.startswith("_")
    ]
    assert {"torch", "matplotlib", "rich", "onnxruntime"} <= set(blocked)
    recipe = {
        **{"vitdeploy": 1, "name": "small", "source": {"model": str(small_export)}, "targets": ["openvino-cpu"]},
        "data": {"path": str(digits), "calibration": {"images": 8}, "evaluation": {"images": 16}},
        **{"precision": "fp32", "bench": {"duration": 0.1}, "budget": {"min_agreement": 0}},
    }
    (tmp_path / "r.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    with command_line(tmp_path, shared_store, short_bench=True) as run:
        assert run("run", "r.yaml", "-o", "bundle").returncode == 0
    words = [{"BUNDLE": "bundle", "OUT": "out"}.get(word, word) for word in command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    arguments = [sys.executable, "-c", WITHOUT, ",".join(blocked), *words]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
