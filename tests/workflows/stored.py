"""What stores hold, to be compared: of commands with workers and without."""

import json
import shutil

# What times decide over.
MEASURED = ("rows", "schedules", "high_precision", "search", "parts", "float_rest", "screen")


def copy_times(source, store):
    """Nothing else may differ between two commands: what is measured is measured once, and taken from there."""
    for path in source.glob("artifacts/*/*/artifact.json"):
        if json.loads(path.read_text())["kind"] in MEASURED:
            shutil.copytree(path.parent, store / path.parent.relative_to(source))


def stored(store):
    """Of each stage, by its key: its name, and the digests of its files."""
    records = [json.loads(path.read_text()) for path in store.glob("artifacts/*/*/artifact.json")]
    return {record["key"]: (record["made"]["name"], record["files"]) for record in records}
