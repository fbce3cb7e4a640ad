"""The recipe stands on values alone: it is there at once, and describes no value a second time."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.compilation.backend import BuildOptions
from vitdeploy.graph.passes.optimize import OptimizeOptions
from vitdeploy.pipeline.job import rewrites_of
from vitdeploy.recipe.recipe import (
    SECTIONS,
    BenchSection,
    BudgetSection,
    OptimizeSection,
    PreprocessSection,
    TensorRtSection,
)
from vitdeploy.runtime.tasks.detection import PostprocessSpec
from vitdeploy.spec import Budget, PreprocessSpec

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "onnx", "onnx_ir", "onnxruntime", "openvino", "tensorrt", "scipy", "matplotlib", "PIL")


def test_validating_a_recipe_loads_no_model_code_and_no_runtime():
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import json
from pathlib import Path
from vitdeploy.recipe.load import load_recipe
recipe = load_recipe(Path({str(ROOT / "recipes" / "digits.yaml")!r}))
print(json.dumps([recipe.name, *(name for name in {HEAVY!r} if name in sys.modules)]))
"""
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["digits"]


@pytest.mark.parametrize(
    ("section", "value"),
    [(BudgetSection, Budget), (SECTIONS["of-PostprocessSpec"], PostprocessSpec), (PreprocessSection, PreprocessSpec)],
)
def test_a_section_has_the_fields_of_its_value(section, value):
    assert list(section.model_fields) == [field.name for field in dataclasses.fields(value)]


def test_what_is_left_out_is_what_the_value_has_without_it():
    assert SECTIONS["of-PostprocessSpec"]().to_spec() == PostprocessSpec()
    assert Budget(**BudgetSection().model_dump()) == Budget()
    assert PreprocessSection(resize=8, crop=4, mean=(0.5,), std=(0.5,)).to_spec() == PreprocessSpec(
        8, (4, 4), mean=(0.5,), std=(0.5,)
    )
    assert TensorRtSection().to_options() == BuildOptions()
    assert rewrites_of(OptimizeSection()) == OptimizeOptions()
    assert Protocol(**BenchSection().model_dump()) == Protocol()
