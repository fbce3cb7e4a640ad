"""A process whose locale writes decimals with a comma, as desktop toolkits and plotting libraries set it."""

import json
import locale
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import vitdeploy as vd
from tests.command_line import command_line
from tests.golden_bundle import write_golden_bundle
from vitdeploy.bundle.read import file_sha256
from vitdeploy.compilation.engine import compile_engine
from vitdeploy.errors import AnswersError
from vitdeploy.publish import native_writes
from vitdeploy.runtime import load

pytest.importorskip("openvino", reason="pip install 'vitdeploy[openvino]'")
ROOT = Path(__file__).parents[2]
LOCALE = "de_DE.UTF-8"
PROGRAM = """
import json, locale, sys
from pathlib import Path
locale.setlocale(locale.LC_ALL, "de_DE.UTF-8")
import vitdeploy as vd
from vitdeploy.graph.io.files import get_metadata, load_graph
graph, digits, out = sys.argv[1:]
images = sorted(Path(digits, "evaluation").glob("*/*.png"))[:20]
found = {}
for target in ("openvino-cpu", "onnxruntime-cpu"):
    with vd.compile(graph, target, Path(out, target), progress=False).load() as predictor:
        found[target] = [predictor.predict(image).top[0].score for image in images]
assert locale.localeconv()["decimal_point"] == "," and locale.str(0.5) == "0,5"
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def with_commas(tmp_path_factory):
    """The environment of a process that can have such a locale."""
    folder = tmp_path_factory.mktemp("locales")
    if shutil.which("localedef") is None:
        pytest.skip("localedef is not installed, which makes a locale")
    made = subprocess.run(
        ["localedef", "-i", "de_DE", "-f", "UTF-8", folder / LOCALE], check=False, capture_output=True, text=True
    )
    if not (folder / LOCALE).exists():
        pytest.skip(f"localedef makes no {LOCALE}: {made.stderr.strip()[:100]}")
    return {**os.environ, "LOCPATH": str(folder), "PYTHONPATH": str(ROOT)}


def decimal_commas(folder):
    return [found for file in folder.rglob("*.xml") for found in re.findall(r'eps="[^"]*,[^"]*"', file.read_text())]


def test_engines_of_such_a_process_are_those_of_any_other(with_commas, small_export, small_bundle, digits, tmp_path):
    argv = [sys.executable, "-c", PROGRAM, str(small_export / "model.onnx"), str(digits), str(tmp_path)]
    done = subprocess.run(argv, cwd=tmp_path, env=with_commas, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with load(small_bundle) as predictor:
        images = sorted((digits / "evaluation").glob("*/*.png"))[:20]
        expected = [predictor.predict(image).top[0].score for image in images]
    for found in json.loads(done.stdout).values():
        assert found == pytest.approx(expected, abs=1e-4)
    assert not decimal_commas(tmp_path)
    assert list(tmp_path.rglob("model.xml"))


def test_a_deployment_in_such_a_process(with_commas, small_export, digits, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCPATH", with_commas["LOCPATH"])
    before = locale.setlocale(locale.LC_NUMERIC)
    locale.setlocale(locale.LC_NUMERIC, LOCALE)
    try:
        with command_line(tmp_path, tmp_path / "store", short_bench=True):
            made = vd.deploy(
                small_export / "model.onnx",
                digits,
                targets=["openvino-cpu"],
                precision="fp32",
                calibration=16,
                min_agreement=20,
                duration=0.1,
                progress=False,
            )
            with made.load() as predictor:
                assert predictor.target == "openvino-cpu-fp32"
        assert locale.str(0.5) == "0,5"
    finally:
        locale.setlocale(locale.LC_NUMERIC, before)
    assert list(made.folder.rglob("model.xml"))
    assert not decimal_commas(tmp_path)


def test_only_the_thread_that_writes_has_decimal_points(with_commas, tmp_path):
    code = """
        import ctypes, locale, threading
        from pathlib import Path
        from vitdeploy.publish import native_writes
        locale.setlocale(locale.LC_ALL, "de_DE.UTF-8")
        native = ctypes.CDLL(None)
        def shown(found):
            text = ctypes.create_string_buffer(20)
            native.snprintf(text, 20, b"%.1f", ctypes.c_double(0.5))
            found.append(text.value.decode())
        found = []
        with native_writes(Path("."), 0):
            shown(found)
            thread = threading.Thread(target=shown, args=(found,))
            thread.start()
            thread.join()
        shown(found)
        print(*found)
    """
    if os.name != "posix":
        pytest.skip("this system has no locales of threads")
    code = "if True:\n" + code
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, cwd=tmp_path, env=with_commas, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0.5", "0,5", "0,5"]


def test_a_failure_leaves_the_locale_as_it_was(tmp_path):
    with pytest.raises(ValueError, match="x"), native_writes(tmp_path, 0):
        raise ValueError("x")


def test_an_engine_that_was_written_with_commas_is_refused_for_that(small_export, small_bundle, tmp_path):
    """And not for the release of its runtime."""
    (tmp_path / "home").mkdir()
    engine = compile_engine(
        small_export / "model.onnx", tmp_path / "home", target="openvino-cpu", precision="fp32", batch=1, placed=0
    )
    for file in (tmp_path / "home").glob("*.onnx"):
        file.rename(file.with_name("graph.onnx"))
    (tmp_path / "bundle").mkdir()
    bundle = write_golden_bundle(small_bundle, engine, tmp_path / "home", tmp_path / "bundle", images=5, tolerance=1e-3)
    (path,) = bundle.rglob("*.xml")
    text = re.sub(r'eps="(\d+)\.(\d+e-\d+)"', r'eps="\1,\2"', path.read_text())
    path.write_text(text)
    document = json.loads((bundle / "manifest.json").read_text())
    for entry in document["files"]:
        if entry["path"] == path.relative_to(bundle).as_posix():
            entry.update(bytes=path.stat().st_size, sha256=file_sha256(path))
    (bundle / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(AnswersError) as refused:
        load(bundle)
    assert "decimal commas in its model.xml" in refused.value.found
    assert refused.value.fix.startswith("compile the engine again")
