"""Results as runs of an MLflow experiment."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitdeploy.errors import HostError, MissingPackageError, VitdeployError
from vitdeploy.history.trackers import Sent, TrackedResult, Tracker, folder_bytes
from vitdeploy.progress import Progress
from vitdeploy.remote import shown_uri

EXPERIMENT = "vitdeploy"
# Limits of a request (https://mlflow.org/docs/latest/rest-api.html), and the states of a completely sent result.
_MOST_PARAMS, _MOST_METRICS, _LONGEST_PARAM, _LONGEST_TAG, _PAGE = 100, 1000, 500, 5000, 1000
_WHOLE = ("FINISHED", "FAILED")
# Retry a refused connection only a few times: MLflow's default of seven retries takes minutes.
_PATIENT = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}
_REFUSED = ("PERMISSION_DENIED", "UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED")


class Mlflow(Tracker):
    """The server, database or folder at a tracking URI (default: MLFLOW_TRACKING_URI). The experiment is
    MLFLOW_EXPERIMENT_NAME, or "vitdeploy"."""

    environment = _PATIENT

    def __init__(self, uri: str) -> None:
        try:
            from mlflow import MlflowClient
        except ModuleNotFoundError as error:
            raise MissingPackageError("mlflow", "tracking", "sending results to MLflow", error=error) from None
        self.name = f"mlflow:{shown_uri(uri)}" if uri else "mlflow"
        self._experiment_name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        self._client: Any = self.ask(lambda: MlflowClient(uri or None))
        self._experiment = ""

    def prepare(self) -> None:
        def find() -> str:
            found = self._client.get_experiment_by_name(self._experiment_name)
            return str(found.experiment_id if found else self._client.create_experiment(self._experiment_name))

        self._experiment = self._experiment or self.ask(find)

    def send(self, outcomes: Sequence[TrackedResult], progress: Progress) -> Sent:
        self.prepare()
        there, new = self.ask(self._there), 0
        for number, outcome in enumerate(outcomes):
            progress(f"sending to {self.name}", number, len(outcomes))
            run, status = there.get(outcome.id, ("", ""))
            if status not in _WHOLE:
                self._write(outcome, run or self.ask(lambda outcome=outcome: self._new(outcome)))  # type: ignore[misc]
                new += 1
        return Sent(f"{self.name}, experiment {self._experiment_name}", new, len(outcomes) - new)

    def _there(self) -> dict[str, tuple[str, str]]:
        """Return run id and status by result."""
        found: dict[str, tuple[str, str]] = {}
        token = None
        while True:
            page = self._client.search_runs(
                [self._experiment], "tags.`vitdeploy.result` LIKE '%'", max_results=_PAGE, page_token=token
            )
            found |= {run.data.tags["vitdeploy.result"]: (run.info.run_id, run.info.status) for run in page}
            token = page.token
            if not token:
                return found

    def _new(self, outcome: TrackedResult) -> str:
        tags = {name: value[:_LONGEST_TAG] for name, value in outcome.tags.items()}
        return str(
            self._client.create_run(self._experiment, _milliseconds(outcome), tags=tags, run_name=outcome.name[:250])
            .info.run_id
        )  # fmt: skip

    def _write(self, outcome: TrackedResult, run: str) -> None:
        """Write all of a result. Values from an earlier attempt are identical and stay."""
        from mlflow.entities import Metric, Param

        time, attached = _milliseconds(outcome), outcome.attach()
        every = {**outcome.params, **attached.params}
        params = [Param(name, value[:_LONGEST_PARAM]) for name, value in every.items()]
        metrics = [Metric(name, value, time, 0) for name, value in outcome.metrics.items()]
        for start in range(0, len(params), _MOST_PARAMS):
            part = params[start : start + _MOST_PARAMS]
            self.ask(lambda part=part: self._client.log_batch(run, params=part))  # type: ignore[misc]
        for start in range(0, len(metrics), _MOST_METRICS):
            batch = metrics[start : start + _MOST_METRICS]
            self.ask(lambda batch=batch: self._client.log_batch(run, metrics=batch))  # type: ignore[misc]
        if attached.files:
            with tempfile.TemporaryDirectory() as folder:
                for name, content in attached.files.items():
                    (Path(folder) / name).write_bytes(content)
                self.ask(lambda: self._client.log_artifacts(run, folder), sum(map(len, attached.files.values())))
        if outcome.bundle is not None:
            bundle = str(outcome.bundle)
            self.ask(lambda: self._client.log_artifacts(run, bundle, "bundle"), folder_bytes(outcome.bundle))
        self.ask(lambda: self._client.set_terminated(run, "FAILED" if outcome.failed else "FINISHED", time))

    def told(self, error: Exception) -> VitdeployError:
        """Translate an error of the client, without its text, which may contain the URI with its password."""
        code = str(getattr(error, "error_code", ""))
        status = getattr(error, "get_http_status_code", lambda: 0)()
        unauthorised = "API request to endpoint" in str(error) and " 401" in str(error)
        if code in _REFUSED or status in (401, 403) or unauthorised:
            return HostError(
                f"{self.name} refuses the credentials",
                found=f"missing or invalid credentials ({code or status})",
                expected="MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
                fix="set them in the environment",
            )
        return HostError(
            f"{self.name} cannot be used",
            found=type(error).__name__ + (f" ({code})" if code else ""),
            expected="a reachable MLflow server",
            fix="check the address (mlflow:URI or MLFLOW_TRACKING_URI) and the server; sending again continues "
            "where this stopped",
        )


def _milliseconds(outcome: TrackedResult) -> int:
    return int(outcome.time.timestamp() * 1000)
