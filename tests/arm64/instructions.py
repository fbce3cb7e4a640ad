"""Which instructions multiply bytes in a program, by what QEMU translated of it while it ran."""

from __future__ import annotations

import re
from pathlib import Path

# "0x7f90a7835728:  912e82a1  add      x1, x21, #0xba0", as QEMU's log "in_asm" writes it.
LINE = re.compile(r"^0x[0-9a-f]+:\s+[0-9a-f]{8}\s+([a-z0-9]+)", re.MULTILINE)
# Products of bytes, summed up in 32 bits: of vectors (FEAT_DotProd, FEAT_I8MM) and of tiles (SME).
DOT_PRODUCTS = ("sdot", "udot", "usdot", "sudot", "smmla", "ummla", "usmmla", "smopa", "umopa", "usmopa", "sumopa")


def dot_products(log: Path) -> str:
    """The dot products that occur in a log; "none" where other instructions do, "" of an empty log."""
    found = set(LINE.findall(log.read_text(encoding="ascii", errors="replace")))
    return " ".join(name for name in DOT_PRODUCTS if name in found) or ("none" if found else "")
