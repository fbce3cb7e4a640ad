"""The number of bits of INT8 weights: 8, or 7 on CPUs where products of 8-bit weights saturate (`host.saturates`).

255 * 63 * 2 is less than 2^15, so that weights of 7 bits give right answers everywhere.
"""

from __future__ import annotations

from vitdeploy.runtime.host import DOT_PRODUCT, VNNI, saturates
from vitdeploy.spec import EngineSpec, WeightBits


def bits_for(isa: str) -> WeightBits:
    """The most that give right answers on a CPU with these instruction sets."""
    return 7 if saturates(isa) else 8


def bits_of(engine: EngineSpec) -> WeightBits | None:
    """The bits of an engine's INT8 weights; None for an engine in float."""
    return (engine.weight_bits or 8) if engine.precision in ("int8", "mixed") else None


def saturation_warning(bits: WeightBits | None, isa: str) -> str:
    """The problem with weights of this many bits on this CPU; "" if there is none."""
    if bits != 8 or not saturates(isa):
        return ""
    return (
        "weights of 8 bits saturate on this CPU, which has no VNNI: answers may be wrong; "
        "vitdeploy quantize --no-vnni makes weights of 7"
    )


def int8_instructions(isa: str) -> str:
    """What a CPU with these instruction sets has for INT8, as a line of the doctor; "" for an unknown one."""
    found = set(isa.split())
    if saturates(isa):
        return "missing  VNNI: INT8 weights are made with 7 bits, as products of 8 would saturate"
    if VNNI & found:
        return "works    VNNI: INT8 weights are made with 8 bits"
    if DOT_PRODUCT & found:
        return "works    dot products: INT8 weights are made with 8 bits"
    if "asimd" in found:
        return "missing  dot products: INT8 is right with 8 bits, by slower instructions: bench says whether it pays"
    return ""


def weight_remarks(engine: EngineSpec, isa: str) -> list[str]:
    """Remarks, with the engine's name, on running it on a CPU that its weights are not made for."""
    bits, warning = bits_of(engine), saturation_warning(bits_of(engine), isa)
    if warning:
        return [f"warning: {engine.artifact}: {warning}"]
    if bits == 7 and not saturates(isa):
        made = "for CPUs without VNNI, which this one has" if VNNI & set(isa.split()) else "for x86 CPUs without VNNI"
        return [
            f"note: {engine.artifact} is made {made}: weights of 8 bits would be nearer to the original here, and what "
            "is measured here is not that CPU"
        ]
    return []
