"""The values that every part shares: tensors, preprocessing, what outputs mean, engines, the manifest.

All are frozen dataclasses of plain data. Nothing here imports more than the standard library.
"""

from __future__ import annotations

from vitdeploy.spec.anomaly import AnomalySpec
from vitdeploy.spec.coding import SPARSE, DecodeError, decode, encode
from vitdeploy.spec.dense import (
    INVERSE_ASSUMED,
    MASKS_ASSUMED,
    DepthResize,
    DepthSpec,
    DepthValues,
    SegmentationMaps,
    SegmentationSpec,
    TensorsSpec,
)
from vitdeploy.spec.detection import Boxes, PostprocessSpec, Scores
from vitdeploy.spec.flow import FlowPart, FlowSpec
from vitdeploy.spec.images import RECONSTRUCTION, ImageSpec
from vitdeploy.spec.instances import PAIRS_ASSUMED, QUERIES_ASSUMED, Candidates, ClassScores, Enlarging, InstanceSpec
from vitdeploy.spec.keypoints import HEATMAPS, Decoding, KeypointSpec
from vitdeploy.spec.manifest import (
    MANIFEST_FORMAT,
    MAX_BATCH,
    Budget,
    EngineSpec,
    FileEntry,
    FloatRest,
    GateStatus,
    GoldenEngine,
    GoldenSpec,
    Grade,
    GraphSpec,
    Manifest,
    Precision,
    WeightBits,
    bound_words,
)
from vitdeploy.spec.preprocess import RESIZING, ChannelOrder, CropRounding, Fit, Interpolation, PreprocessSpec
from vitdeploy.spec.prompts import PromptSpec
from vitdeploy.spec.tasks import POSTPROCESS, LabelKind, Postprocess, Task, tokenizer_file
from vitdeploy.spec.tensors import TensorSpec, last_axis
from vitdeploy.spec.texts import (
    CLEANINGS,
    BeamSpec,
    Clean,
    OpenVocabularySpec,
    ReadsTexts,
    SequenceSpec,
    TextSpec,
    ZeroShotSpec,
)

__all__ = [
    "CLEANINGS",
    "HEATMAPS",
    "INVERSE_ASSUMED",
    "MANIFEST_FORMAT",
    "MASKS_ASSUMED",
    "MAX_BATCH",
    "PAIRS_ASSUMED",
    "POSTPROCESS",
    "QUERIES_ASSUMED",
    "RECONSTRUCTION",
    "RESIZING",
    "SPARSE",
    "AnomalySpec",
    "BeamSpec",
    "Boxes",
    "Budget",
    "Candidates",
    "ChannelOrder",
    "ClassScores",
    "Clean",
    "CropRounding",
    "DecodeError",
    "Decoding",
    "DepthResize",
    "DepthSpec",
    "DepthValues",
    "EngineSpec",
    "Enlarging",
    "FileEntry",
    "Fit",
    "FloatRest",
    "FlowPart",
    "FlowSpec",
    "GateStatus",
    "GoldenEngine",
    "GoldenSpec",
    "Grade",
    "GraphSpec",
    "ImageSpec",
    "InstanceSpec",
    "Interpolation",
    "KeypointSpec",
    "LabelKind",
    "Manifest",
    "OpenVocabularySpec",
    "Postprocess",
    "PostprocessSpec",
    "Precision",
    "PreprocessSpec",
    "PromptSpec",
    "ReadsTexts",
    "Scores",
    "SegmentationMaps",
    "SegmentationSpec",
    "SequenceSpec",
    "Task",
    "TensorSpec",
    "TensorsSpec",
    "TextSpec",
    "WeightBits",
    "ZeroShotSpec",
    "bound_words",
    "decode",
    "encode",
    "last_axis",
    "tokenizer_file",
]
