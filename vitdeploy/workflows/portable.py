"""What another process, here or elsewhere, makes the runner of a subject of: plain data that can be pickled."""

from __future__ import annotations

import dataclasses
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from vitdeploy.errors import StorageError, WorkerError
from vitdeploy.models.source import Source
from vitdeploy.pipeline.artifact import open_bundle
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.runner import Runner
from vitdeploy.spec import EngineSpec
from vitdeploy.stages.reference_model import find_reference_model, reference_runner
from vitdeploy.stages.shards import Identity
from vitdeploy.store.key import artifact_key
from vitdeploy.store.store import Store
from vitdeploy.workflows.identities import engine_identity, original_identity


class Portable(Protocol):
    """A subject in another process."""

    def sent(self, identity: Identity, store: Store) -> Portable:
        """The same, of files that are found where the store is."""
        ...

    def runner(self, identity: Identity, store: Store) -> Runner:
        """Its runner (not loaded yet), here.

        Raises:
            WorkerError: here it is not what it is in the process that asks, whose `identity` is given.
            StorageError: its files are not in the store. Errors of reading it propagate.
        """
        ...


@dataclass(frozen=True)
class PortableOriginal:
    """An original: its source, whose paths lead to the same files everywhere."""

    source: Source

    def sent(self, identity: Identity, store: Store) -> PortableOriginal:
        return self

    def runner(self, identity: Identity, store: Store) -> Runner:
        _require_same(original_identity(find_reference_model(self.source)), identity)
        return reference_runner(self.source)


@dataclass(frozen=True)
class PortableEngine:
    """An engine of a bundle. `compiled` for this command, into a folder that goes with it: it is sent by the store,
    under `key`."""

    folder: Path
    engine: EngineSpec
    trust: Path | None
    compiled: bool
    key: str = ""

    def sent(self, identity: Identity, store: Store) -> PortableEngine:
        if not self.compiled:
            return dataclasses.replace(self, folder=self.folder.absolute())
        kind = "evaluated-engine"
        key = artifact_key(kind, identity.config, identity.inputs, identity.tools)
        if store.find(key) is None:
            store.make(key, kind, identity.config, identity.inputs, identity.tools, self._copy)
        return dataclasses.replace(self, key=key)

    def _copy(self, out: Path) -> None:
        shutil.copytree(self.folder, out, dirs_exist_ok=True)

    def runner(self, identity: Identity, store: Store) -> Runner:
        folder, engine = self.folder, self.engine
        if self.key:
            found = store.find(self.key)
            if found is None:
                raise StorageError(
                    f"{engine.artifact} is not in the store of {socket.gethostname()}",
                    found="nothing under its key",
                    wanted="one store for the whole evaluation",
                    fix="set VITDEPLOY_SHARED_STORE on all machines",
                )
            folder = found.path
        manifest, _ = open_bundle(folder, self.trust)
        _require_same(engine_identity(manifest, engine, compiled=self.compiled), identity)
        return make_runner(folder, engine, trust=self.trust, spinning=False)


def _require_same(here: Identity, asked: Identity) -> None:
    """Raise WorkerError if an artifact is made of other files here, or is computed by other tools."""
    for found, wanted in ((here.inputs, asked.inputs), (here.tools, asked.tools)):
        if (name := _differing(found, wanted)) is not None:
            raise WorkerError(
                f"{socket.gethostname()} would give other answers than the machine that asks",
                found=f"{name}: {found.get(name, 'nothing')}"[:300],
                wanted=f"{name}: {wanted.get(name, 'nothing')}"[:300],
                fix="have the same files and packages on all nodes, and nodes of one kind",
            )


def _differing(found: Mapping[str, str], wanted: Mapping[str, str]) -> str | None:
    return next((name for name in sorted({*found, *wanted}) if found.get(name) != wanted.get(name)), None)
