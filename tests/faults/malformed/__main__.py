"""Write one case of the figure "malformed files" and say its command: python -m tests.faults.malformed KIND NUMBER DIR.

The table of `make faults` names a case as [KIND NUMBER: command].
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from tests.faults.malformed.figure import KINDS
from tests.faults.sandbox import preload
from tests.faults.seeds import make_apart

preload(())
kind = next(each for each in KINDS if each.name == sys.argv[1])
work = Path(sys.argv[3]).absolute()
attempt = kind.attempt(int(sys.argv[2]), work / "case", make_apart(work))
damage = kind.damage(attempt.number)
damage.make(attempt)
print(f"{damage.name}\ncd {shlex.quote(str(attempt.folder))}; vitdeploy {shlex.join(map(str, attempt.words))}")
