"""What stores hold, to be compared: of commands with workers and without."""

import json
import os
import re
import shutil
from collections import Counter

# What times decide over.
MEASURED = ("schedules", "high_precision", "search", "parts", "float_rest", "screen")


def copy_times(source, store):
    """Nothing else may differ between two commands: what is measured is measured once, and taken from there."""
    for path in source.glob("artifacts/*/*/artifact.json"):
        if json.loads(path.read_text())["kind"] in MEASURED:
            shutil.copytree(path.parent, store / path.parent.relative_to(source))


def stored(store):
    """Of each stage, by its key: its name, and the digests of its files."""
    records = [json.loads(path.read_text()) for path in store.glob("artifacts/*/*/artifact.json")]
    return {record["key"]: (record["made"]["name"], record["files"]) for record in records}


def check_made_beside(log, said):
    """Every stage was made once, all but the originals' answers by other processes than the command, and was told once,
    whoever made it. `log`: the store's; `said`: what the command told with -v."""
    assert set(Counter(line.key for line in log).values()) == {1}
    assert {line.made.name for line in log if line.made.pid == os.getpid()} == {"reference"}
    assert len({line.made.pid for line in log}) >= 3
    told = [line.removeprefix("made ") for line in said.splitlines() if line.startswith("made ")]
    # Of several image sizes each line begins with its own.
    assert Counter(re.sub(r"^\d+x\d+: ", "", name) for name in told) == Counter(line.made.name for line in log)
