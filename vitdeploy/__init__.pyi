from vitdeploy.api.artifacts import Bundle as Bundle
from vitdeploy.api.artifacts import Graph as Graph
from vitdeploy.api.artifacts import Model as Model
from vitdeploy.api.bench import Benchmark as Benchmark
from vitdeploy.api.bench import bench as bench
from vitdeploy.api.deploy import Deployment as Deployment
from vitdeploy.api.deploy import Tuned as Tuned
from vitdeploy.api.deploy import deploy as deploy
from vitdeploy.api.deploy import plan as plan
from vitdeploy.api.deploy import run as run
from vitdeploy.api.deploy import tune as tune
from vitdeploy.api.deploy import tune_recipe as tune_recipe
from vitdeploy.api.graph import compile as compile
from vitdeploy.api.graph import export as export
from vitdeploy.api.graph import optimize as optimize
from vitdeploy.api.images import Images as Images
from vitdeploy.api.images import images as images
from vitdeploy.api.model import model as model
from vitdeploy.api.quantize import QuantizedGraph as QuantizedGraph
from vitdeploy.api.quantize import quantize as quantize
from vitdeploy.api.sweep import SweepPlan as SweepPlan
from vitdeploy.api.sweep import Swept as Swept
from vitdeploy.api.sweep import plan_sweep as plan_sweep
from vitdeploy.api.sweep import sweep as sweep
from vitdeploy.api.verify import Bisection as Bisection
from vitdeploy.api.verify import Compared as Compared
from vitdeploy.api.verify import Verification as Verification
from vitdeploy.api.verify import bisect as bisect
from vitdeploy.api.verify import compare as compare
from vitdeploy.api.verify import verify as verify
from vitdeploy.devices.api import bench_on as bench_on
from vitdeploy.devices.api import verify_on as verify_on
from vitdeploy.history.api import History as History
from vitdeploy.history.api import Reported as Reported
from vitdeploy.history.api import read_history as read_history
from vitdeploy.history.api import record as record
from vitdeploy.history.api import report_to as report_to
from vitdeploy.releases.api import Versions as Versions
from vitdeploy.releases.api import versions as versions
from vitdeploy.runtime.load import load as load
from vitdeploy.runtime.monitor import Monitor as Monitor
from vitdeploy.runtime.predictor import Predictor as Predictor
from vitdeploy.runtime.tasks.detection import PostprocessSpec
from vitdeploy.spec import PreprocessSpec

Preprocess = PreprocessSpec
Postprocess = PostprocessSpec
__version__: str
