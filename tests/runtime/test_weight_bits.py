"""Which CPUs saturate with 8-bit weights, and what is said of an engine on a CPU that it is not made for."""

import pytest

from vitdeploy.runtime.host import saturates
from vitdeploy.runtime.values import bits_for, bits_of, saturation_warning, weight_remarks
from vitdeploy.spec import EngineSpec, decode, encode

HASWELL, SKYLAKE_X, CASCADE_LAKE, ALDER_LAKE, SAPPHIRE_RAPIDS, ARM = (
    "avx2",
    "avx2 avx512f",
    "avx2 avx512f avx512_vnni",
    "avx2 avx_vnni",
    "avx2 avx512f avx512_vnni avx_vnni avx512_bf16 amx_int8 amx_bf16",
    "asimd asimddp i8mm",
)
CORTEX_A53 = "asimd"


@pytest.mark.parametrize(
    ("isa", "expected"),
    [
        *((isa, True) for isa in (HASWELL, SKYLAKE_X)),
        *((isa, False) for isa in (CASCADE_LAKE, ALDER_LAKE, SAPPHIRE_RAPIDS, ARM, CORTEX_A53, "unknown", "")),
    ],
)
def test_x86_without_vnni_saturates_and_nothing_else(isa, expected):
    assert saturates(isa) is expected
    assert bits_for(isa) == (7 if expected else 8)


def engine(precision, weight_bits):
    return EngineSpec("openvino-cpu", precision, "g", ("g",), 1, True, "CPU", (), (), weight_bits=weight_bits)


def test_an_engine_without_a_record_has_8_bits_where_it_has_int8():
    old = {key: value for key, value in encode(engine("int8", None)).items() if key != "weight_bits"}
    assert bits_of(decode(EngineSpec, old)) == bits_of(engine("mixed", None)) == 8
    assert bits_of(engine("int8", 7)) == 7
    assert bits_of(engine("fp32", None)) is None


def test_8_bits_are_warned_of_where_they_saturate():
    [text] = weight_remarks(engine("int8", 8), HASWELL)
    assert text == (
        "warning: openvino-cpu-int8: 8-bit weights may saturate on this CPU, which has no VNNI: answers may be wrong; "
        "vitdeploy quantize --no-vnni makes 7-bit weights"
    )
    assert saturation_warning(8, HASWELL) in text
    assert weight_remarks(engine("int8", 7), HASWELL) == weight_remarks(engine("fp32", None), HASWELL) == []


def test_7_bits_are_told_of_where_8_would_do():
    [text] = weight_remarks(engine("int8", 7), CASCADE_LAKE)
    assert text.startswith("note: openvino-cpu-int8 has 7-bit weights for CPUs without VNNI (this CPU has it)")
    assert saturation_warning(7, CASCADE_LAKE) == ""
    assert weight_remarks(engine("int8", 8), CASCADE_LAKE) == weight_remarks(engine("fp32", None), CASCADE_LAKE) == []


@pytest.mark.parametrize("isa", [ARM, CORTEX_A53])
def test_7_bits_on_arm_are_not_told_of_vnni_that_no_arm_has(isa):
    [text] = weight_remarks(engine("int8", 7), isa)
    assert text.startswith(
        "note: openvino-cpu-int8 has 7-bit weights for x86 CPUs without VNNI: 8-bit weights would be closer"
    )
    assert weight_remarks(engine("int8", 8), isa) == []
