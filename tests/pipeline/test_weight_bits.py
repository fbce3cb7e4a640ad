"""How many bits a recipe's INT8 weights have, and which steps of its plan depend on that."""

import dataclasses
from pathlib import Path

import pytest

from vitdeploy.pipeline.job import prepare, weight_bits
from vitdeploy.pipeline.outcome import said_of_weights
from vitdeploy.pipeline.plan import make_plan
from vitdeploy.progress import silent
from vitdeploy.recipe.load import load_recipe
from vitdeploy.runtime import host
from vitdeploy.spec import EngineSpec, encode
from vitdeploy.stages.step import Candidate, write_json
from vitdeploy.store.store import Artifact

RECIPE = Path(__file__).parents[2] / "recipes" / "digits.yaml"


@pytest.fixture
def cpu(monkeypatch):
    """Tells this process that it runs on a CPU with these flags."""
    return lambda *flags: monkeypatch.setattr(host, "_cpuinfo", lambda text: ("a CPU", set(flags)))


@pytest.mark.parametrize(
    ("flags", "vnni", "bits"),
    [({"avx2"}, None, 7), ({"avx2"}, True, 8), ({"avx_vnni"}, None, 8), ({"avx_vnni"}, False, 7), (set(), None, 8)],
)
def test_the_device_decides_and_without_a_word_it_is_this_machine(cpu, flags, vnni, bits):
    cpu(*flags)
    assert weight_bits(vnni) == bits


def test_the_bits_are_part_of_what_int8_is_made_by_and_of_nothing_in_float(cpu):
    [job] = prepare(load_recipe(RECIPE, ["precision=mixed"]), skip_bad=False, progress=silent)

    def bits(vnni, *flags):
        cpu(*flags)
        recipe = job.recipe.model_copy(update={"vnni": vnni})
        steps = make_plan(dataclasses.replace(job, recipe=recipe))
        return {step.name: step.config["weight_bits"] for step in steps if "weight_bits" in step.config}

    steps = bits("auto", "avx2")
    assert {name for name in steps if name.startswith("search")} == {
        "search openvino-cpu-mixed",
        "search onnxruntime-cpu-mixed",
    }
    assert steps == {name: 8 if name.endswith("fp32") else 7 for name in steps}
    assert bits(False, "avx2", "avx_vnni") == steps
    assert set(bits("auto", "avx2", "avx_vnni").values()) == set(bits(True, "avx2").values()) == {8}


def test_a_run_says_where_its_weights_are_made_for_another_cpu(tmp_path, cpu):
    engine = EngineSpec("openvino-cpu", "int8", "g", ("g",), 1, True, "CPU", (), (), weight_bits=7)
    write_json(tmp_path / "engine.json", encode(engine))
    candidate = Candidate("openvino-cpu", "int8", shipped=True)
    artifacts = {candidate.step("compile"): Artifact(tmp_path, "", "")}
    cpu("avx2", "avx_vnni")
    [text] = said_of_weights(artifacts, candidate)
    assert text.startswith("note: openvino-cpu-int8 has 7-bit weights for CPUs without VNNI (this CPU has it)")
    cpu("avx2")
    assert said_of_weights(artifacts, candidate) == []
