"""What the server of `tests.forked` loads; frozen, so that a garbage collection in what it forks copies nothing."""

import gc

import onnxruntime  # noqa: F401
import openvino  # noqa: F401
import scipy.optimize
import scipy.stats  # noqa: F401

import vitdeploy.pipeline.assemble
import vitdeploy.pipeline.reference_worker
import vitdeploy.recipe.load  # noqa: F401
from tests.torchvision_operators import declare

declare()  # a measuring process builds an original of transformers by itself
gc.collect()
gc.freeze()
