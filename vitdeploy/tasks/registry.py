"""The table of tasks: the adapter class of each task."""

from vitdeploy.extensions import RowTable
from vitdeploy.tasks.adapter import Setting, TaskAdapter
from vitdeploy.tasks.anomaly import AnomalyAdapter
from vitdeploy.tasks.binary import BinaryAdapter
from vitdeploy.tasks.classification import ClassificationAdapter
from vitdeploy.tasks.counted import CountedAdapter
from vitdeploy.tasks.depth import DepthAdapter
from vitdeploy.tasks.detection import DetectionAdapter
from vitdeploy.tasks.embedding import EmbeddingAdapter
from vitdeploy.tasks.features import FeaturesAdapter
from vitdeploy.tasks.foreground import ForegroundAdapter
from vitdeploy.tasks.heads import HeadsAdapter
from vitdeploy.tasks.image_to_image import ImageToImageAdapter
from vitdeploy.tasks.image_to_text import ImageToTextAdapter
from vitdeploy.tasks.instance_segmentation import InstanceSegmentationAdapter
from vitdeploy.tasks.keypoints import KeypointsAdapter
from vitdeploy.tasks.multi_label import MultiLabelAdapter
from vitdeploy.tasks.open_vocabulary import OpenVocabularyAdapter
from vitdeploy.tasks.panoptic import PanopticAdapter
from vitdeploy.tasks.prompted import PromptedAdapter
from vitdeploy.tasks.regression import RegressionAdapter
from vitdeploy.tasks.segmentation import SegmentationAdapter
from vitdeploy.tasks.sequence import SequenceAdapter
from vitdeploy.tasks.tensors import TensorsAdapter
from vitdeploy.tasks.zero_shot import ZeroShotAdapter

TASKS: RowTable[type[TaskAdapter]] = RowTable(
    "vitdeploy.tasks",
    TaskAdapter,
    {
        "classification": ClassificationAdapter,
        "multi-label": MultiLabelAdapter,
        "binary": BinaryAdapter,
        "features": FeaturesAdapter,
        "embedding": EmbeddingAdapter,
        "detection": DetectionAdapter,
        "panoptic": PanopticAdapter,
        "sequence": SequenceAdapter,
        "segmentation": SegmentationAdapter,
        "instance-segmentation": InstanceSegmentationAdapter,
        "depth": DepthAdapter,
        "regression": RegressionAdapter,
        "foreground": ForegroundAdapter,
        "anomaly": AnomalyAdapter,
        "zero-shot": ZeroShotAdapter,
        "open-vocabulary-detection": OpenVocabularyAdapter,
        "tensors": TensorsAdapter,
        "keypoints": KeypointsAdapter,
        "image-to-image": ImageToImageAdapter,
        "promptable-segmentation": PromptedAdapter,
        "image-to-text": ImageToTextAdapter,
        "heads": HeadsAdapter,
    },
)


def make_adapter(setting: Setting) -> TaskAdapter:
    return TASKS[setting.task](setting)


def counted_adapter(setting: Setting) -> CountedAdapter | None:
    """Return the adapter of a task that can be counted in shards, else None."""
    adapter = make_adapter(setting)
    return adapter if isinstance(adapter, CountedAdapter) and adapter.in_shards else None
