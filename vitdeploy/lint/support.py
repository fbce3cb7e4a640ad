"""What TensorRT's ONNX parser supports, by release: opsets, operators and their types, as documented (not tested).

Sources: `docs/operators.md` of github.com/onnx/onnx-tensorrt, at the commits that NVIDIA/TensorRT pins for a release.

| release | read at | what differs |
|---|---|---|
| 10.3 | 96e78110 (10.1 GA) | the nearest earlier one; what 10.2 and 10.3 added is from `docs/Changelog.md` |
| 10.16 | 6bde6596 (10.16 GA) | |
| 11.4 | 7c51a63a (11.1 GA) | the nearest earlier one; the highest opset is that of 11.1, as 11.5's notes bring 25 |

The release of each operator is from the changelogs of both repositories. The IR version is that of the ONNX
release which the parser is built with (1.16, 1.19, 1.20); the parser itself does not check it. That of 10.16 is derived
from its opset.
"""

from dataclasses import dataclass

import onnx_ir as ir

from vitdeploy.errors import TargetError

Release = tuple[int, int]

_FLOATS = "FLOAT FLOAT16 BFLOAT16"
_NUMBERS = f"{_FLOATS} INT32 INT64"
_ANY = f"{_NUMBERS} BOOL"
_HALF = "FLOAT FLOAT16"

# Types of the data -> operators, as of 11.1.
_OPERATORS = {
    _FLOATS: """
        Acos Acosh Asin Asinh Atan Atanh AveragePool BatchNormalization Ceil Celu Clip Conv ConvTranspose Cos Cosh
        CumSum Dropout Einsum Elu Erf Exp Floor GRU Gemm GlobalAveragePool GlobalLpPool GlobalMaxPool
        GroupNormalization HardSigmoid HardSwish Hardmax ImageScaler InstanceNormalization IsInf LRN LSTM
        LayerNormalization LeakyRelu Log LogSoftmax LpNormalization LpPool MatMul MaxPool MeanVarianceNormalization
        PRelu ParametricSoftplus QuantizeLinear RMSNormalization RNN RandomNormal RandomNormalLike RandomUniform
        RandomUniformLike Reciprocal Resize RotaryEmbedding Round ScaledTanh Scan Selu Sigmoid Sin Sinh Softmax
        Softplus Softsign Sqrt Swish Tan Tanh ThresholdedRelu Upsample
    """,
    _NUMBERS: """
        Abs Add ArgMax ArgMin DepthToSpace Div Equal Greater GreaterOrEqual IsNaN Less LessOrEqual Max Min Mod Mul Neg
        Pad Pow Range ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd
        ReduceSum ReduceSumSquare Relu Scatter ScatterElements ScatterND Shrink Sign SpaceToDepth Sub Sum TopK
    """,
    _ANY: """
        Concat Expand EyeLike Flatten Gather GatherElements GatherND Identity If Loop OneHot Reshape ReverseSequence
        Shape Size Slice Split Squeeze Tile Transpose Trilu Unsqueeze Where
    """,
    _HALF: "BlackmanWindow DeformConv GridSample HammingWindow HannWindow Mish NonMaxSuppression NonZero RoiAlign",
    "BOOL": "And Not Or Xor",
    "FLOAT": "STFT",
    f"{_ANY} UINT8": "Cast CastLike",
    f"{_ANY} FLOAT8E4M3FN FLOAT4E2M1 INT4": "Constant ConstantOfShape",
    "INT8 FLOAT8E4M3FN FLOAT4E2M1 INT4": "DequantizeLinear",
    f"{_NUMBERS} INT8": "Gelu",
    f"{_NUMBERS} FLOAT8E4M3FN": "Mean",
    f"{_FLOATS} INT8 FLOAT8E4M3FN": "Attention",
    f"{_FLOATS} INT32": "TensorScatter",
}
_TYPES = {
    operator: frozenset(ir.DataType[name] for name in types.split())
    for types, operators in _OPERATORS.items()
    for operator in operators.split()
}
# The release that added an operator, if later than 10.3.
_SINCE: dict[str, Release] = {
    **dict.fromkeys(("BlackmanWindow", "HammingWindow", "HannWindow"), (10, 4)),
    "STFT": (10, 5),
    "Attention": (10, 14),
    **dict.fromkeys(("RMSNormalization", "RotaryEmbedding", "TensorScatter"), (10, 15)),
    "Swish": (11, 0),
}
# Types that a release after 10.3 added to an operator.
_LATER: dict[str, tuple[Release, frozenset[ir.DataType]]] = {
    "Pow": ((10, 12), frozenset({ir.DataType.INT32, ir.DataType.INT64})),
    "DequantizeLinear": ((10, 8), frozenset({ir.DataType.FLOAT4E2M1})),
    # The changelogs date FP4 alone.
    **dict.fromkeys(
        ("Constant", "ConstantOfShape"),
        ((10, 8), frozenset({ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT4E2M1, ir.DataType.INT4})),
    ),
}
# Types that QuantizeLinear may write and DequantizeLinear may read. INT4 and FP4 are for weights only.
QUANTIZED = frozenset(
    {ir.DataType.INT8, ir.DataType.FLOAT8E4M3FN, ir.DataType.INT4, ir.DataType.FLOAT4E2M1},
)


@dataclass(frozen=True)
class Support:
    """The support of one release: the opsets that its table covers, and the newest IR version of its ONNX."""

    name: str
    opsets: range
    ir_version: int

    @property
    def release(self) -> Release:
        major, minor = self.name.split(".")
        return int(major), int(minor)

    def types(self, operator: str) -> frozenset[ir.DataType] | None:
        """Return the data types that the parser supports for an ONNX operator; None for an unsupported operator."""
        types = _TYPES.get(operator)
        if types is None or self.release < _SINCE.get(operator, (0, 0)):
            return None
        since, later = _LATER.get(operator, ((0, 0), frozenset()))
        return types - later if self.release < since else types


SUPPORTED = {
    support.name: support
    for support in (
        Support("10.3", range(9, 21), 10),
        Support("10.16", range(9, 25), 12),
        Support("11.4", range(9, 25), 13),
    )
}
VERSIONS = tuple(SUPPORTED)


def support_of(version: str) -> Support:
    """Return the facts of release "10.3", "10.16" or "11.4".

    Raises:
        TargetError: another version.
    """
    if version not in SUPPORTED:
        raise TargetError(
            "the linter has no facts about this TensorRT version", found=version, expected=", ".join(VERSIONS)
        )
    return SUPPORTED[version]


def nearest_version(installed: str) -> str:
    """Return the known version for an installed TensorRT ("10.7.0.23", "11.4.0.106"): the newest that is not newer, or
    the oldest if all are newer.

    Raises:
        TargetError: `installed` is not a version.
    """
    try:
        major, minor = (int(part) for part in installed.split(".")[:2])
    except ValueError:
        raise TargetError("not a TensorRT version", found=installed, expected="a version such as 11.4.0") from None
    older = [support for support in SUPPORTED.values() if support.release <= (major, minor)]
    return max(older, key=lambda support: support.release).name if older else VERSIONS[0]
