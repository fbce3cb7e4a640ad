"""One engine in a report: the result of `verify`, the quantization of its layers, and its gate."""

from dataclasses import dataclass, field

from vitdeploy.document.verified import Verified
from vitdeploy.search.precision import Mixed, Sensitivity
from vitdeploy.spec import SPARSE, WeightBits
from vitdeploy.verification.gate import Gate


@dataclass(frozen=True)
class FoldFacts:
    """A fold before `layers`: the exponent `alpha` of the channels' scales (None without scaling), whether channels
    were `shifted`, the factor `gain` by which the expected squared error is reduced, and a description (`what`)."""

    layers: tuple[str, ...]
    alpha: float | None
    shifted: bool
    gain: float
    what: str


@dataclass(frozen=True)
class HiddenFacts:
    """Changes of the hidden channels that `layer` reads, as in `FoldFacts`. `copies`: the number of copies by
    channel."""

    layer: str
    alpha: float | None
    copies: dict[str, int]
    gain: float
    what: str


@dataclass(frozen=True)
class Quantization:
    """The layers in INT8, and those left in float with the reason for each. Mixed precision adds what its choice was
    based on; the typed INT8 of TensorRT does not. `int4`: the layers with only their weights in INT4."""

    int8: tuple[str, ...]
    float: dict[str, str]
    folds: tuple[FoldFacts, ...]
    hidden: tuple[HiddenFacts, ...]
    int4: tuple[str, ...] | None = field(default=None, metadata=SPARSE)
    sensitivity: Sensitivity | None = field(default=None, metadata=SPARSE)
    mixed: Mixed | None = field(default=None, metadata=SPARSE)


@dataclass(frozen=True)
class HalfMacs:
    """MACs in half precision and in float32."""

    half: int
    float32: int


@dataclass(frozen=True)
class HalfFacts:
    """Half precision that is typed in the graph. `float32`: the operators in float32, with reasons;
    `residual_exponent`: the power of two that divides the residual stream; `underflow`: by tensor, the share of its
    values that underflow to zero."""

    type: str
    residual_exponent: int
    float32: dict[str, str]
    macs: HalfMacs
    underflow: dict[str, float]


@dataclass(frozen=True)
class PlacementFacts:
    """The content of placement.json: layers as in `Quantization`, and facts of single precisions. `scores`: products of
    queries and keys in INT8; `dynamic`: layers whose inputs the runtime quantizes, with reasons; `group`: the number of
    inputs that share a scale, by layer; `embeddings`: tables in INT8; `why`: the result of the search for layers in
    higher precision."""

    target: str
    int8: tuple[str, ...]
    float: dict[str, str]
    scores: tuple[str, ...] = ()
    dynamic: dict[str, str] = field(default_factory=dict)
    int4: tuple[str, ...] | None = None
    group: dict[str, int] | None = None
    embeddings: tuple[str, ...] = ()
    why: str = ""
    folds: tuple[FoldFacts, ...] = ()
    hidden: tuple[HiddenFacts, ...] = ()
    half: HalfFacts | None = None

    @property
    def quantized(self) -> bool:
        """Whether any layer has weights in INT8 or INT4."""
        return bool(self.int8 or self.int4 or self.dynamic)


@dataclass(frozen=True)
class EngineFacts:
    """One engine. `bytes`: the size of the files that the runtime loads; `kernels`: linears and convolutions by the
    precision that they ran in; `shipped`: whether the recipe requests it; `accepted`: known-bad entries that apply to
    it and that the recipe accepts."""

    artifact: str
    target: str
    precision: str
    provider: str
    shipped: bool
    bytes: int
    kernels: dict[str, int]
    verify: Verified
    gate: Gate
    weight_bits: WeightBits | None = None
    quantization: Quantization | None = None
    half: HalfFacts | None = None
    accepted: tuple[str, ...] | None = field(default=None, metadata=SPARSE)
