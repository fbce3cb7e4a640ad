"""KServe on Kubernetes: an `InferenceService` over the repository of Triton, or of OpenVINO Model Server.

Source: KServe's API, `serving.kserve.io/v1beta1` InferenceService (predictor.model: modelFormat, runtime,
protocolVersion, storageUri, resources) and `v1alpha1` ServingRuntime; its own runtime `kserve-tritonserver`.
"""

from __future__ import annotations

from pathlib import Path

from vitdeploy.embed.servers import ovms, triton
from vitdeploy.embed.servers.layout import TASKS, TEMPLATES, find_serving, server_name, write_client
from vitdeploy.embed.source import find_embedded, render

MANIFEST = "inference-service.yaml"


def write(folder: Path, out: Path) -> list[str]:
    """Fill the empty folder `out` with a model repository and its manifest; gives the commands that deploy and test it.

    Raises as `source.find_embedded` and `layout.find_serving`.
    """
    found = find_embedded(folder, tuple(triton.BACKENDS), TASKS, "KServe")
    serving = find_serving(found)
    with_ovms = found.engine.target in ovms.TARGETS
    if with_ovms:
        ovms.write_repository(found, out / "models")
    else:
        triton.write_repository(found, serving, out / "models")
    name = server_name(found)
    facts: dict[str, object] = {"name": name, "with_ovms": with_ovms, "serving": serving}
    (out / MANIFEST).write_text(render(TEMPLATES, "inference_service.yaml.jinja", facts), encoding="utf-8")
    start = f"kubectl apply -f {MANIFEST}\nkubectl port-forward service/{name}-predictor 8080:80 &"
    why = (*serving.measured, ovms.NO_BATCHES if with_ovms else serving.batching)
    server = "KServe, with " + ("OpenVINO Model Server" if with_ovms else "Triton")
    settings = f"{MANIFEST} and models/"
    write_client(
        found, serving, out, server=server, start=start, port=8080, why=why, settings=settings, manifest=MANIFEST
    )
    return [f"kubectl apply -f {MANIFEST}"]
