"""Every entry of the table: a graph that shows it is found, one that nearly does is not; and where it is seen here."""

import json

import onnx_ir as ir
import pytest

from tests.known_bad.graphs import CASES
from vitdeploy.errors import InputError, KnownBadError, KnownBadTableError
from vitdeploy.known_bad.entries import TABLE_FILE, digest_of, read_table, table
from vitdeploy.known_bad.find import check_ids, known_findings, matches, matches_on, refuse_known_bad
from vitdeploy.known_bad.platform import Platform, concerns, entries_for, platform_here, platform_of
from vitdeploy.spec import EngineSpec

BY_ID = {entry.id: entry for entry in table()}
RF_DETR = BY_ID["openvino-constant-attention"]


def platform(version="2026.4.1", runtime="openvino", device="CPU", isa=(), precision="fp32"):
    return Platform(runtime, device, version, frozenset(isa), precision)


def graph(name, case=0):
    return ir.from_proto(CASES[name][case]()[0])


def test_every_entry_has_a_case():
    assert set(CASES) == set(BY_ID)


@pytest.mark.parametrize("name", CASES)
def test_an_entry_is_found_in_a_graph_that_shows_it_and_in_no_other(name):
    [found] = matches(graph(name), [BY_ID[name]])
    assert found.entry.id == name
    assert all(found.nodes)
    assert matches(graph(name, 1), [BY_ID[name]]) == []


def test_matching_leaves_a_graph_as_it_is():
    model = graph("tensorrt-10.3-rotary")
    before = ir.to_proto(model).SerializeToString()
    assert matches(model)
    assert ir.to_proto(model).SerializeToString() == before


def test_what_a_release_cannot_read_is_refused_on_every_device_in_other_words():
    name = "openvino-grid-sample-modes"
    for device in ("CPU", "GPU", None):
        where = platform("2026.2.1", device=device)
        with pytest.raises(KnownBadError, match=r"openvino 2026\.2\.1 cannot read it") as refused:
            refuse_known_bad(matches(graph(name), [BY_ID[name]]), where, "it")
        assert concerns(BY_ID[name], where) and "2026.3 or newer" in refused.value.fix
    assert not concerns(BY_ID[name], platform("2026.3.0"))


# --- which releases and machines -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "there"),
    [("2025.2.0", False), ("2025.3.0", True), ("2025.4.1", True), ("2026.0.0", True), ("2026.1.0", False)],
)
def test_an_entry_is_about_its_releases(version, there):
    assert concerns(RF_DETR, platform(version)) is there


def test_a_release_that_nobody_knows_may_be_any():
    assert concerns(RF_DETR, platform(None))
    assert concerns(RF_DETR, platform("made by us"))


def test_an_entry_is_about_its_runtime_device_instruction_sets_and_precisions():
    sme, gpu = BY_ID["onnxruntime-sme-unequal-pads"], BY_ID["tensorrt-blackwell-rotary"]
    assert concerns(sme, platform("1.27.0", "onnxruntime", isa=["asimddp", "sme"]))
    assert not concerns(sme, platform("1.27.0", "onnxruntime", isa=["asimddp"]))
    assert not concerns(RF_DETR, platform("2026.0.0", device="GPU"))
    assert concerns(RF_DETR, platform("2026.0.0", device=None))  # where the runtime chooses
    assert not concerns(RF_DETR, platform("2026.0.0", runtime="onnxruntime"))
    assert concerns(gpu, platform("10.16.1", "tensorrt", "GPU", ["sm_120"], "fp16"))
    assert not concerns(gpu, platform("10.16.1", "tensorrt", "GPU", ["sm_120"], "fp32"))
    assert not concerns(gpu, platform("10.16.1", "tensorrt", "GPU", ["sm_90"], "fp16"))


def test_the_platform_of_an_engine_is_where_it_was_compiled():
    facts = {"isa": "avx2 avx_vnni", "openvino": "2026.0.0-20965-c6d6a13a886-releases/2026/0"}
    engine = EngineSpec("openvino-cpu", "int8", "g", ("g",), 1, True, "CPU", (), (), device=facts)
    assert platform_of(engine) == platform("2026.0.0", isa=["avx2", "avx_vnni"], precision="int8")
    facts = {"tensorrt": "10.4.0", "compute_capability": "12.0"}
    engine = EngineSpec("tensorrt", "fp16", "g", ("g",), 1, True, "GPU", (), (), device=facts)
    assert platform_of(engine) == platform("10.4.0", "tensorrt", "GPU", ["sm_120"], "fp16")


def test_intels_devices_are_those_of_the_table():
    for target, kind in (("openvino-gpu", "GPU"), ("openvino-npu", "NPU"), ("openvino-auto", None)):
        platform = platform_here(target)
        assert (platform.runtime, platform.device) == ("openvino", kind)
    assert "openvino-npu-windowed-attention" in {each.id for each in entries_for(platform_here("openvino-npu"))}


def test_the_platform_here_has_the_installed_release():
    import onnxruntime

    assert platform_here("onnxruntime-cpu").version == onnxruntime.__version__


# --- the refusal ------------------------------------------------------------------------------------------------------


def test_a_refusal_says_what_where_and_the_way_out():
    at, found = platform("2026.0.0"), matches_on(graph(RF_DETR.id), platform("2026.0.0"))
    [node] = found[0].nodes
    with pytest.raises(KnownBadError, match=r"openvino 2026\.0\.0 is known to compute model\.onnx wrongly") as caught:
        refuse_known_bad(found, at, "model.onnx")
    error = caught.value
    assert error.exit_code == 4
    assert error.entries == (RF_DETR.id,)
    assert error.found == f"{RF_DETR.id} at {node}: {RF_DETR.wrong}"
    assert error.expected == f"a release outside {RF_DETR.versions}"
    assert error.fix.startswith(RF_DETR.way_out)
    assert error.fix.endswith(f"--accept-known-bad {RF_DETR.id}")
    assert refuse_known_bad(found, at, "model.onnx", [RF_DETR.id]) == (RF_DETR.id,)


@pytest.mark.parametrize("name", ["openvino-topk-ties", "openvino-tokens-as-heads"])
def test_what_is_noted_or_avoided_is_no_refusal(name):
    found = matches_on(graph(name), platform("2026.4.1"))
    assert [match.entry.id for match in found] == [name]
    assert refuse_known_bad(found, platform(), "model.onnx") == ()


def test_an_unknown_id_is_not_accepted():
    with pytest.raises(InputError, match=r"unknown entries .*: openvino-all") as caught:
        check_ids([RF_DETR.id, "openvino-all"])
    assert RF_DETR.id in caught.value.expected


# --- the linter -------------------------------------------------------------------------------------------------------


def test_the_linter_names_the_entry_the_releases_and_the_source():
    found = known_findings(graph("tensorrt-10.3-rotary"), ["10.3", "10.16", "11.4"])
    assert [(each.rule, each.severity, each.versions) for each in found] == [
        ("tensorrt-10.3-rotary", "error", ("10.3",)),
        ("tensorrt-blackwell-rotary", "warning", ("10.3", "10.16")),  # on one kind of GPU alone
    ]
    assert "https://github.com/NVIDIA/TensorRT/issues/4723" in found[0].fix
    assert known_findings(graph("tensorrt-10.3-rotary", 1), ["10.3", "10.16", "11.4"]) == []


# --- the table --------------------------------------------------------------------------------------------------------


def test_a_table_of_our_own_breaks_no_rule():
    assert read_table(TABLE_FILE) == table()
    assert [entry.id for entry in entries_for(platform("2025.2.0"))]
    assert digest_of("openvino") != digest_of("onnxruntime")


def spoilt(change):
    found = json.loads(TABLE_FILE.read_text(encoding="utf-8"))
    change(found)
    return json.dumps(found)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "No such file"),
        ("", "Expecting value"),
        ("[]", "$: found '[]', expected an object"),
        (spoilt(lambda t: t.update(format=2)), "$.format: found '2', expected one of 1"),
        (spoilt(lambda t: t["entries"][0].pop("wrong")), "$.entries[0].wrong: missing"),
        (spoilt(lambda t: t["entries"][0].update(versions="2025")), "not a PEP 440 version specifier"),
        (spoilt(lambda t: t["entries"][0].update(action="ignore")), "$.entries[0].action: found 'ignore'"),
        (spoilt(lambda t: t["entries"][0].update(sources=[])), "has no source"),
        (spoilt(lambda t: t["entries"][0].update(pattern={})), "expected either matcher or operators"),
        (spoilt(lambda t: t["entries"][0].update(pattern={"matcher": "no"})), "$.entries[0].pattern.matcher: found"),
        (spoilt(lambda t: t["entries"].append(t["entries"][0])), "duplicate entries openvino-free-lengths"),
        (
            spoilt(lambda t: t["entries"][0].update(pattern={"operators": ["A"], "attributes": {"a": {}}})),
            "expected one of values, at_least, present and absent",
        ),
    ],
)
def test_a_table_that_cannot_be_read_is_refused(text, says, tmp_path):
    file = tmp_path / "table.json"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    with pytest.raises(KnownBadTableError, match="cannot be read") as caught:
        read_table(file)
    assert says in caught.value.found
    assert caught.value.exit_code == 4
