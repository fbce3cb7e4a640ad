"""Results as runs of a Weights & Biases project."""

import contextlib
import netrc
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from vitdeploy.errors import HostError, MissingPackageError, VitdeployError
from vitdeploy.history import trackers as tracker
from vitdeploy.history.trackers import Sent, TrackedResult, Tracker, folder_bytes
from vitdeploy.progress import Progress

PROJECT = "vitdeploy"
# Marker file in the folder of a completely written offline run.
_WHOLE = "vitdeploy.whole"
_OFFLINE = ("offline", "dryrun")
# The size of a file without records, and how long the size of a complete file stays the same.
_HEADER_BYTES, _MOMENT = 7, 0.05
_SILENT = {"WANDB_SILENT": "true"}


class Wandb(Tracker):
    """A project, optionally of an entity; by default WANDB_PROJECT, or "vitdeploy". With WANDB_MODE=offline, runs are
    files below WANDB_DIR (default: the current folder) for `wandb sync`."""

    environment = _SILENT

    def __init__(self, place: str) -> None:
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise MissingPackageError("wandb", "tracking", "sending results to Weights & Biases", error=error) from None
        self._wandb: Any = wandb
        entity, _, project = place.rpartition("/")
        self._entity, self._project = entity or None, project or os.environ.get("WANDB_PROJECT") or PROJECT
        self._offline = os.environ.get("WANDB_MODE", "") in _OFFLINE
        self.name = f"wandb:{f'{entity}/' if entity else ''}{self._project}"

    def prepare(self) -> None:
        if os.environ.get("WANDB_MODE") == "disabled":
            raise HostError(f"{self.name} is switched off", found="WANDB_MODE=disabled", expected="online or offline")
        if not self._offline:
            if not self.ask(self._has_key):
                raise self._no_key("none")
            self.ask(lambda: self._wandb.login(verify=True))

    def _has_key(self) -> bool:
        """Whether the client finds a key, so that it does not prompt for one."""
        if any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")):
            return True
        settings = self._wandb.setup().settings
        host = urlsplit(str(settings.base_url)).hostname or ""
        files = [os.environ.get("NETRC") or "", "~/.netrc", "~/_netrc"]
        with contextlib.suppress(netrc.NetrcParseError):
            for file in (Path(each).expanduser() for each in files if each):
                if file.is_file() and netrc.netrc(file).authenticators(host):
                    return True
        return bool(settings.api_key)

    def send(self, outcomes: Sequence[TrackedResult], progress: Progress) -> Sent:
        self.prepare()
        new = 0
        for number, outcome in enumerate(outcomes):
            progress(f"sending to {self.name}", number, len(outcomes))
            if not (self._offline and any(_home().glob(f"*wandb/offline-run-*-{outcome.id}/{_WHOLE}"))):
                new += self._write(outcome)
        return Sent(self.name + (", offline" if self._offline else ""), new, len(outcomes) - new)

    def _write(self, outcome: TrackedResult) -> bool:
        """Write a run and return whether it is new. An existing run is overwritten with the same values."""
        attached = outcome.attach()
        run = self.ask(lambda: self._begin(outcome, attached.params))
        new = not run.resumed

        def fill() -> None:
            run.summary.update(outcome.metrics)
            if attached.files:
                page = self._wandb.Artifact(f"result-{outcome.id[:12]}", "report")
                for name, content in attached.files.items():
                    with page.new_file(name, "wb") as file:
                        file.write(content)
                run.log_artifact(page)
            if outcome.bundle is not None:
                bundle = self._wandb.Artifact(f"bundle-{outcome.id[:12]}", "model", metadata=outcome.tags)
                for path in (each for each in sorted(outcome.bundle.rglob("*")) if each.is_file()):
                    bundle.add_file(str(path), path.relative_to(outcome.bundle).as_posix())
                run.log_artifact(bundle)
            run.finish(exit_code=1 if outcome.failed else 0)

        size = sum(map(len, attached.files.values())) + (folder_bytes(outcome.bundle) if outcome.bundle else 0)
        self.ask(fill, size)
        if self._offline:
            folder = Path(run.dir).parent
            self.ask(lambda: _wait_for_file(folder / f"run-{outcome.id}.wandb"))
            (folder / _WHOLE).touch()
        return new

    def _begin(self, outcome: TrackedResult, params: dict[str, str]) -> Any:
        return self._wandb.init(
            entity=self._entity,
            project=self._project,
            id=outcome.id,
            name=outcome.name[:120],
            group=outcome.rows[0].model[:120],
            job_type=outcome.rows[0].kind,
            tags=[f"undecided: {outcome.tags['vitdeploy.undecided']}"[:60]],
            config={**outcome.tags, **outcome.params, **params},
            resume=None if self._offline else "allow",
            mode="offline" if self._offline else "online",
            dir=str(_home()),
            reinit="create_new",
            settings=self._settings(),
        )

    def _settings(self) -> Any:
        """Settings that send only the result: no code, no system metrics, no console output."""
        return self._wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            x_disable_stats=True,
            x_disable_meta=True,
            x_save_requirements=False,
            init_timeout=tracker.PATIENCE_SECONDS / 2,
        )

    def told(self, error: Exception) -> VitdeployError:
        """Translate an error of the client, without its text, which may contain the key."""
        kind = type(error).__name__
        if kind == "UsageError" or (kind == "AuthenticationError" and re.search("error 40[13]", str(error))):
            return self._no_key("a key that the server refuses")
        return HostError(
            f"{self.name} cannot be used",
            found=kind,
            expected="a reachable server and a project that accepts runs",
            fix="check WANDB_BASE_URL and the network; WANDB_MODE=offline writes files for `wandb sync`",
        )

    def _no_key(self, found: str) -> HostError:
        return HostError(
            f"{self.name} needs credentials",
            found=found,
            expected="WANDB_API_KEY in the environment, or a login with `wandb login`",
            fix="set WANDB_API_KEY, or WANDB_MODE=offline to write files for `wandb sync` without credentials",
        )


def _wait_for_file(file: Path) -> None:
    """Wait for a complete file: the client's service finishes it shortly after `finish` returns."""
    before, size = -1, 0
    while size <= _HEADER_BYTES or size != before:
        time.sleep(_MOMENT)
        before, size = size, file.stat().st_size


def _home() -> Path:
    return Path(os.environ.get("WANDB_DIR") or ".")
