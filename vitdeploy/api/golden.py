"""Every engine of a bundle against its golden answers, on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitdeploy.spec import EngineSpec, Manifest


def check_bundle(folder: Path, trust: Path | None) -> tuple[list[dict[str, Any]], list[str], bool]:
    """The result for each engine, its lines for people, and whether all that run here give the golden answers.

    Raises:
        HostError: no engine runs here. Errors of reading the bundle propagate.
    """
    from vitdeploy.bundle.read import read_bundle
    from vitdeploy.bundle.sign import signed_by
    from vitdeploy.errors import HostError

    manifest = read_bundle(folder)
    signed_by(folder, trust)
    documents = [_check(folder, manifest, engine, trust) for engine in manifest.engines]
    if all(each["ok"] is None for each in documents):
        raise HostError(
            f"no engine of {folder} runs here", found="; ".join(each["error"] for each in documents) or "no engine"
        )
    return documents, [_line(each) for each in documents], all(each["ok"] is not False for each in documents)


def _check(folder: Path, manifest: Manifest, engine: EngineSpec, trust: Path | None) -> dict[str, Any]:
    """`ok` is None if the engine does not run here."""
    from vitdeploy.errors import HostError
    from vitdeploy.runtime.engine import make_runner
    from vitdeploy.runtime.golden import check_golden

    try:
        with make_runner(folder, engine, trust=trust) as runner:
            found = check_golden(folder, manifest, engine, runner)
    except HostError as error:
        return {"engine": engine.artifact, "ok": None, "error": error.message}
    return {"engine": engine.artifact, "ok": found.ok, "gate": manifest.gate(engine), **vars(found)}


def _line(found: dict[str, Any]) -> str:
    if found["ok"] is None:
        return f"golden {found['engine']}: does not run here: {found['error']}"
    right = found["difference"] <= found["tolerance"] and found["same"] >= found["least_same"]
    verdict = "ok" if found["ok"] else f"PROVES NOTHING ({found['proves_nothing']})" if right else "DIFFERS"
    failed = "; it failed its budget when the bundle was made" if found["gate"] == "fail" else ""
    return (
        f"golden {found['engine']}: {verdict}, {found['same']} of {found['inputs']} answers are the original's "
        f"(at least {found['least_same']} must be), largest difference {found['difference']:.1e} of the largest output "
        f"from when the bundle was made (allowed {found['tolerance']:.1e}){failed}"
    )
