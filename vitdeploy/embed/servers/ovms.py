"""Intel's OpenVINO Model Server: `config.json` and `<model>/1/model.xml`, `.bin`.

Source: OpenVINO Model Server, "Model Server Parameters": model_config_list, base_path relative to the file, nireq,
plugin_config.
"""

from __future__ import annotations

import json
from pathlib import Path

from vitdeploy.embed.servers.layout import TASKS, VERSION, copy_engine, find_serving, server_name, write_client
from vitdeploy.embed.source import Embedded, find_embedded
from vitdeploy.runtime.openvino import PRECISION_HINTS

TARGETS = ("openvino-cpu",)
SERVER = "Intel's OpenVINO Model Server"
PORT = 8000
NO_BATCHES = "This server makes no batches: a client may send several images in one request."
START = (
    f'docker run --rm -d -p {PORT}:8000 -v "$PWD/models:/models" openvino/model_server:latest'
    " --config_path /models/config.json --rest_port 8000"
)


def write(folder: Path, out: Path) -> list[str]:
    """Fill the empty folder `out` with a model repository; gives the commands that serve and test it.

    Raises as `source.find_embedded` and `layout.find_serving`.
    """
    found = find_embedded(folder, TARGETS, TASKS, "OpenVINO Model Server")
    serving = find_serving(found)
    write_repository(found, out / "models")
    why = (*serving.measured, NO_BATCHES)
    write_client(found, serving, out, server=SERVER, start=START, port=PORT, why=why, settings="models/config.json")
    return [START, f"python client.py --url localhost:{PORT}"]


def write_repository(found: Embedded, models: Path) -> None:
    """`models/config.json`, and the engine in `models/<name>/1/`."""
    name = server_name(found)
    copy_engine(found, models / name / VERSION)
    plugin = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": PRECISION_HINTS[found.engine.precision]}
    plugin.update(found.engine.options)
    config = {"name": name, "base_path": name, "target_device": "CPU", "nireq": 1, "plugin_config": plugin}
    document = {"model_config_list": [{"config": config}]}
    (models / "config.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
