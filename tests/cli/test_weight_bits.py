"""Commands on a CPU without VNNI: 7-bit weights by default, and a word wherever CPU and weights do not fit."""

import json

import pytest

from tests.command_line import command_line
from vitdeploy.bundle.read import read_bundle
from vitdeploy.runtime import host, load

TARGET = "onnxruntime-cpu"
SATURATES = "8-bit weights may saturate on this CPU, which has no VNNI"
HAS_VNNI = f"note: {TARGET}-int8 has 7-bit weights for CPUs without VNNI (this CPU has it)"


@pytest.fixture
def cpu(monkeypatch):
    """Tells this process that it runs on a CPU with these flags."""
    return lambda *flags: monkeypatch.setattr(host, "_cpuinfo", lambda text: ("a CPU", set(flags)))


@pytest.fixture
def here(shared_store, tmp_path):
    with command_line(tmp_path, shared_store, short_bench=True) as here:
        yield here


@pytest.fixture(scope="module")
def bundles(tmp_path_factory, shared_store, small_export, digits):
    """A bundle of the small model by the bits of its weights, with what `quantize` said when it was made."""
    folder = tmp_path_factory.mktemp("bundles")
    bundles = {}
    with command_line(folder, shared_store) as run, pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "_cpuinfo", lambda text: ("a CPU", {"avx2"}))
        for bits, flags in ((8, ["--vnni"]), (7, [])):
            options = ("--data", digits / "calibration", "--num-samples", 16, "--target", TARGET, "--json")
            said = run("quantize", small_export, *options, "-o", f"int{bits}", *flags)
            assert run("compile", f"int{bits}", "--target", TARGET, "-o", f"bundle{bits}").returncode == 0
            bundles[bits] = (folder / f"bundle{bits}", said)
    return bundles


def test_quantize_takes_7_bits_where_8_saturate(bundles):
    document = bundles[7][1].document
    assert (document["weight_bits"], document["warnings"]) == (7, [])
    assert "weights have 7 bits, for CPUs without VNNI" in bundles[7][1].stderr
    document = bundles[8][1].document
    assert document["weight_bits"] == 8
    assert SATURATES in document["warnings"][0]
    assert [read_bundle(bundles[bits][0]).engines[0].weight_bits for bits in (7, 8)] == [7, 8]


def test_quantize_takes_8_bits_where_they_do_not(here, cpu, small_export, digits):
    cpu("avx2", "avx_vnni")
    options = ("--data", digits / "calibration", "--num-samples", 16, "--target", TARGET, "--json")
    assert here("quantize", small_export, *options, "-o", "eight").document["weight_bits"] == 8
    assert here("quantize", small_export, *options, "-o", "seven", "--no-vnni").document["weight_bits"] == 7


def test_a_predictor_warns_of_weights_that_saturate(here, cpu, bundles, digits, recwarn):
    image = next((digits / "evaluation").rglob("*.png"))
    for bits, flags, warned in ((8, {"avx2"}, True), (7, {"avx2"}, False), (8, {"avx2", "avx_vnni"}, False)):
        cpu(*flags)
        recwarn.clear()
        with load(bundles[bits][0]):
            assert [SATURATES in str(each.message) for each in recwarn] == [True] * warned
        done = here("predict", bundles[bits][0], image, "--json")
        assert (SATURATES in done.stderr) is bool(done.document["warnings"]) is warned


def test_verify_and_bench_say_where_weights_and_cpu_do_not_fit(here, cpu, bundles, small_export, digits):
    verify = ("--against", small_export, "--data", digits / "calibration", "--num-samples", 4)
    for bits, flags, words in ((8, {"avx2"}, SATURATES), (7, {"avx2", "avx_vnni"}, HAS_VNNI)):
        cpu(*flags)
        done = here("verify", bundles[bits][0], *verify)
        assert words in done.stdout, done.stderr
    done = here("bench", bundles[7][0], "--batch", "1", "--duration", 0.01, "--json")
    assert [HAS_VNNI in text for text in done.document["remarks"]] == [True]
    cpu("avx2")
    assert "VNNI" not in here("verify", bundles[7][0], *verify).stdout


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"avx2"}, "missing  VNNI: INT8 weights use 7 bits"),
        ({"avx2", "avx512f", "avx512_vnni"}, "works    VNNI: INT8 weights use 8 bits"),
        ({"asimddp"}, ""),
    ],
)
def test_doctor_says_whether_the_cpu_has_vnni(here, cpu, flags, expected):
    cpu(*flags)
    text = here("doctor").stdout
    assert expected in text
    assert ("VNNI" in text) is bool(expected)


def test_a_bisection_proposes_weights_that_fit_the_cpu(cpu, bundles):
    from vitdeploy.search.bisect import Fix, fixed_bits
    from vitdeploy.workflows.bisection import _BisectionFormatter

    eight, seven = (read_bundle(bundles[bits][0]).engines[0] for bits in (8, 7))
    fix = Fix("quantize", (), 1.0, 0.1, enough=True)
    for flags, expected in (({"avx2"}, [7, 7]), ({"avx2", "avx_vnni"}, [8, 7])):
        cpu(*flags)
        assert [fixed_bits(engine) for engine in (eight, seven)] == expected
        commands = [_BisectionFormatter("a", "g", "d", engine, "{}").command(fix) for engine in (eight, seven)]
        assert ["--no-vnni" in command for command in commands] == [bits == 7 for bits in expected]


def test_a_bundle_of_another_number_of_bits_is_refused(tmp_path, bundles):
    from vitdeploy.errors import ManifestError

    manifest = json.loads((bundles[8][0] / "manifest.json").read_text(encoding="utf-8"))
    manifest["engines"][0]["weight_bits"] = 4
    (tmp_path / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(ManifestError, match=r"engines\[0\].weight_bits"):
        read_bundle(tmp_path)
