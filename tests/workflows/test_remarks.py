"""What the screening says in words."""

import pytest

from vitdeploy.document.sweep import VariantFacts
from vitdeploy.workflows.variants import Variant, four_bits_remarks, remarks

FP32, BF16, INT8 = (Variant("openvino-cpu", precision) for precision in ("fp32", "bf16", "int8"))
MERGED = Variant("openvino-cpu", "int8", ((1, 192), (6, 128)))


def rounds(median, jitter=0.0):
    return [median * (1 + jitter * (-1) ** i) for i in range(12)]


def facts(variant, distance, size, milliseconds, finalist):
    shape = variant.target, variant.precision, variant.merges
    times = milliseconds, tuple(rounds(milliseconds))
    return VariantFacts(variant.name, *shape, *times, size, finalist, 8, distance, (distance, distance), None)


@pytest.mark.parametrize(
    ("int8", "jitter", "said"),
    [
        (5.0, 0.0, []),
        (10.0, 0.0, ["BF16 is faster than INT8 on openvino-cpu (latency ratio 1.25 [1.17, 1.33]): use BF16 there."]),
        (8.0, 0.1, ["INT8 is not provably faster than BF16 on openvino-cpu (latency ratio 0.99 [0.85, 1.17])."]),
    ],
)
def test_int8_against_the_fastest_float(int8, jitter, said):
    medians = {FP32.name: rounds(16.0), BF16.name: rounds(8.0), INT8.name: rounds(int8, jitter)}
    assert remarks([FP32, BF16, INT8], medians) == said


@pytest.mark.parametrize(
    ("merged", "jitter", "told"),
    [
        (4.0, 0.0, "is faster on openvino-cpu: latency ratio 0.80 [0.75, 0.85]"),
        (6.0, 0.0, "is slower on openvino-cpu: latency ratio 1.20 [1.13, 1.28]"),
        (5.0, 0.1, "is not provably faster on openvino-cpu: latency ratio 0.99 [0.85, 1.17]"),
    ],
)
def test_merging_against_the_same_without(merged, jitter, told):
    medians = {FP32.name: rounds(16.0), INT8.name: rounds(5.0), MERGED.name: rounds(merged, jitter)}
    [said] = remarks([FP32, INT8, MERGED], medians)
    assert said == f"Merging to 192 tokens in block 1, then to 128 tokens in block 6 {told} to the unchanged graph."


def test_pruning_against_the_same_without():
    pruned = Variant("openvino-cpu", "int8", prune=0.4)
    medians = {FP32.name: rounds(16.0), INT8.name: rounds(5.0), pruned.name: rounds(4.0)}
    assert remarks([FP32, INT8, pruned], medians) == [
        "Pruning 40 % of the MACs is faster on openvino-cpu: latency ratio 0.80 [0.75, 0.85] to the unchanged graph."
    ]


def test_a_disturbed_screening_says_nothing_of_times():
    medians = {FP32.name: rounds(16.0), INT8.name: rounds(5.0), MERGED.name: rounds(4.0)}
    [said] = remarks([FP32, INT8, MERGED], medians, "others had 40 % of the CPUs' time: measure again")
    assert said == (
        "The speed ranking of the variants is not decided: others had 40 % of the CPUs' time: measure again."
    )


def test_a_name_says_what_is_done():
    assert Variant("openvino-cpu", "int8", prune=0.05).name == "openvino-cpu-int8 pruned 0.05"
    assert MERGED.name == "openvino-cpu-int8 tokens 1:192+6:128"
    assert MERGED.plain == INT8


def test_int4_weights_are_told_with_what_they_save_and_cost():
    int4 = Variant("openvino-cpu", "int4")
    plain, merged = facts(INT8, 0.004, 7_200_000, 4.0, True), facts(MERGED, 0.01, 1, 3.0, True)
    [said] = four_bits_remarks([plain, facts(int4, 0.1, 4_400_000, 6.0, False), merged], "KL, nats")
    assert said == (
        "INT4 weights on openvino-cpu vs. INT8: 4.4 MB vs. 7.2 MB, latency ratio 1.50 [1.41, 1.60], "
        "KL, nats 0.1 vs. 0.004: not a finalist: another variant is closer to the original and as fast."
    )
    final = facts(int4, 0.1, 4_400_000, 6.0, True)
    [told] = four_bits_remarks([plain, final], "KL, nats", "others were busy")
    assert "4.4 MB vs. 7.2 MB, times not decided, KL, nats 0.1 vs. 0.004: a finalist." in told
    assert four_bits_remarks([final, merged], "KL, nats") == []
