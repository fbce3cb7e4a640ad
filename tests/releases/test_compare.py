"""A bundle on releases of a runtime: on the one that is here, and with VITDEPLOY_TEST_DEPTH on others."""

import os
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.version import Version

import vitdeploy as vd
from tests.known_bad import bundles
from vitdeploy.benchmark import run as benchmark
from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.benchmark.summary import Ratio
from vitdeploy.devices.client import agent_package
from vitdeploy.document.commands import AnswersFacts, ReleaseFacts
from vitdeploy.errors import HubError, InputError
from vitdeploy.progress import silent
from vitdeploy.releases import compare
from vitdeploy.releases.compare import compare_versions, parse_releases
from vitdeploy.releases.environments import Environment, Environments, NotInstalled

DEEP = pytest.mark.skipif("VITDEPLOY_TEST_DEPTH" not in os.environ, reason="installs releases: VITDEPLOY_TEST_DEPTH=1")
SHORT = Protocol.of_singles(block_seconds=0.02, warmup=0.0, rounds=3)
RELEASES = [Version(text) for text in ("2025.1.0", "2025.2.0", "2025.4.1", "2026.0.0", "2026.1.0.dev1", "2026.1.2")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("openvino==2025.2..2025.4", ["2025.2.0", "2025.4.1"]),
        ("openvino == 2025.4.1 .. 2026", ["2025.4.1", "2026.0.0", "2026.1.2"]),
        ("openvino==2026.1..2026.1", ["2026.1.2"]),
        ("openvino>=2025.2,<2026", ["2025.2.0", "2025.4.1"]),
        ("openvino==2025.4.*", ["2025.4.1"]),
        ("openvino==2026.1.0.dev1", ["2026.1.0.dev1"]),
        ("openvino==2027..2028", []),
    ],
)
def test_the_releases_of_a_range(text, expected):
    assert list(map(str, parse_releases(text).of(RELEASES))) == expected


@pytest.mark.parametrize(
    ("text", "message", "found"),
    [
        ("openvino", "is not a range of releases", "no releases"),
        ("openvino==2026..2025", "is not a range of releases", "the first release is newer than the last"),
        ("openvino==2025.2..new", "is not a range of releases", "Expected"),
        ("../openvino", "is not a range of releases", "Expected package name"),
        ("openvino[x]==2025.2", "is not a range of releases", "more than a name and releases"),
        ("torch==2.1..2.2", "cannot compare releases of torch", "torch==2.1..2.2"),
        ("tensorrt==10.3..10.4", "cannot compare releases of tensorrt", "tensorrt==10.3..10.4"),
    ],
)
def test_what_is_no_range(text, message, found):
    with pytest.raises(InputError, match=message) as caught:
        parse_releases(text)
    assert found in caught.value.found


# --- one release, in the Python of the tests --------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Environments that are this one, with its release of ONNX Runtime; no process waits for a quiet machine."""
    import onnxruntime

    zone = tmp_path / "zone.pyz"
    zone.write_bytes(agent_package().data)
    installed, environment = Version(onnxruntime.__version__), Environment(Path(sys.executable), zone)

    class Here(Environments):
        def released(self, package):
            return [Version("1.19.0"), installed]

        def elsewhere(self, package):
            return [Version("1.18.0"), installed]

        def of(self, package, version):
            if version != installed:
                raise NotInstalled("no such wheel")
            return environment

    monkeypatch.setattr(compare, "Environments", Here)
    monkeypatch.setattr(benchmark._Meter, "wait", lambda meter: None)
    return str(installed)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return bundles.written(bundles.norm(), "onnxruntime-cpu", tmp_path_factory.mktemp("versions") / "bundle")


def versions(bundle, text, rebuild=False):
    found = compare_versions(bundle, text, SHORT, rebuild=rebuild, progress=silent, note=lambda text: None)
    return vd.Versions(found)


def test_a_release_that_answers_right_is_measured_beside_its_own(here, bundle):
    found = versions(bundle, "onnxruntime>=1.18")
    [release] = found.document.releases
    assert (release.version, release.artifact) == (here, "onnxruntime-cpu-fp32")
    assert release.answers.ok
    assert (release.answers.same, release.answers.inputs) == (bundles.SAMPLES, bundles.SAMPLES)
    assert release.answers.difference < 1e-5
    assert release.time.metric == "latency"
    assert 0 < release.time.ratio < 100
    assert found.document.own == {"onnxruntime-cpu-fp32": here}
    assert found.document.skipped == {"1.18.0": "not available for this Python and system", "1.19.0": "no such wheel"}
    assert found.wrong == ()
    table = found.lines()[1].lines()
    assert table[1].split()[:5] == [here, "ok", "4", "of", "4"]
    assert "1.19.0 skipped: no such wheel" in found.lines()
    # An undecided ratio and its interval come from different measures: only the bounds are shown.
    undecided = replace(release.time, ratio=0.52, ci95=(0.02, 0.12), decided=False, bounds=(None, 0.88))
    shown = vd.Versions(replace(found.document, releases=(replace(release, time=undecided),)))
    assert "at most 0.88" in str(shown) and "0.52" not in str(shown)


def test_a_release_that_answers_wrong_is_said_and_not_measured(here, tmp_path):
    spoilt = bundles.written(bundles.norm(), "onnxruntime-cpu", tmp_path / "spoilt", spoilt=0.5)
    found = versions(spoilt, f"onnxruntime=={here}", rebuild=True)
    [release] = found.document.releases
    assert not release.answers.ok
    assert release.time is None
    assert release.answers.kernels == {"fp32": 1}
    assert found.wrong == (here,)
    assert found.lines()[1].lines()[1].split()[1] == "WRONG"


def test_a_release_that_cannot_read_the_engine_is_said(here, bundle, monkeypatch):
    monkeypatch.setattr(compare, "CHECK", "vitdeploy.no_such_module")
    [release] = versions(bundle, f"onnxruntime=={here}").document.releases
    assert release.answers is None
    assert "onnxruntime-cpu-fp32" in release.error.message
    assert "does not run" in versions(bundle, f"onnxruntime=={here}").lines()[1].lines()[1]


def test_a_range_without_a_release_another_runtime_and_a_bundle_without_golden_answers(here, bundle, tmp_path):
    with pytest.raises(InputError, match=r"no release in onnxruntime==1\.18\.0 can be installed here") as caught:
        versions(bundle, "onnxruntime==1.18.0")
    assert caught.value.found == f"available here: 1.19.0 to {here}; on other systems: 1.18.0"
    with pytest.raises(InputError, match=r"has no engine for openvino on the CPU") as caught:
        versions(bundle, "openvino==2025.2..2026.4")
    assert caught.value.expected == "releases of onnxruntime"
    graph = bundle.with_name("bundle-work") / "model.onnx"
    bare = vd.compile(graph, "onnxruntime-cpu", tmp_path / "bare", progress=False)
    with pytest.raises(InputError, match="has no golden answers for onnxruntime-cpu-fp32"):
        versions(bare.folder, "onnxruntime==1.20..1.21")


def test_what_changed_is_told_by_answers_and_by_decided_times():
    ratio = Ratio("a", "b", "latency", 1.0, (0.9, 1.1))
    good = AnswersFacts(True, 8, 8, 8, 1e-6, 1e-3)
    first = ReleaseFacts("1", "a", good, ratio)
    slower = replace(first, version="2", time=replace(ratio, ratio=1.5, ci95=(1.4, 1.6)))
    doubted = replace(first, version="3", time=replace(ratio, ratio=2.5, ci95=(2.4, 2.6), decided=False))
    wrong = replace(first, version="4", answers=replace(good, ok=False, same=1), time=None)
    rows = compare._with_changes([first, slower, doubted, wrong])
    assert [row.changed for row in rows] == [(), ("time",), (), ("answers",)]


# --- environments, with pip -------------------------------------------------------------------------------------------


def wheel(folder, name, version, code):
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        info = f"{name}-{version}.dist-info"
        file.writestr(f"{name}.py", code)
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


@DEEP
def test_an_environment_is_made_once_or_not_at_all(tmp_path, monkeypatch):
    """Of wheels in a folder, which pip's own settings name."""
    links = tmp_path / "links"
    links.mkdir()
    for name in ("numpy", "pillow"):
        wheel(links, name, "1.0", "")
    wheel(links, "onnxruntime", "1.20.0", "")
    wheel(links, "onnxruntime", "1.21.0", "raise ImportError('libgone.so')")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    environments = Environments(tmp_path)
    assert list(map(str, environments.released("onnxruntime"))) == ["1.20.0", "1.21.0"]
    made = environments.of("onnxruntime", Version("1.20.0"))
    before = made.python.lstat().st_mtime_ns
    assert environments.of("onnxruntime", Version("1.20.0")).python.lstat().st_mtime_ns == before
    with pytest.raises(NotInstalled, match=r"import fails: ImportError: libgone\.so"):
        environments.of("onnxruntime", Version("1.21.0"))
    with pytest.raises(NotInstalled, match="No matching distribution"):
        environments.of("onnxruntime", Version("1.22.0"))
    with pytest.raises(HubError, match="pip finds no releases of openvino"):
        environments.released("openvino")
    assert not list(environments.root.glob("*1.21*"))
    assert not list(environments.root.glob(".tmp-*"))
