"""Logs: one JSON object per line on standard error."""

from __future__ import annotations

import json
import logging
import sys
import time

from vitdeploy.runtime.monitor import MonitorEvent

LOGGER = logging.getLogger("vitdeploy.serve")


class JsonFormatter(logging.Formatter):
    """Writes for each record: "time" (UTC), "level", "message", the `fields` of `extra`, and the "trace" of an
    error."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry = {"time": f"{stamp}.{int(record.msecs):03d}Z", "level": record.levelname.lower()}
        entry["message"] = record.getMessage()
        entry.update(getattr(record, "fields", {}))
        if record.exc_info:
            entry["trace"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def log_to_stderr(quiet: bool) -> None:
    """Requests and what the server has to say; only warnings and errors with `quiet`."""
    logging.captureWarnings(True)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    for name, level in (
        ("vitdeploy.serve", logging.INFO),
        ("uvicorn", logging.WARNING),
        ("py.warnings", logging.WARNING),
    ):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(logging.WARNING if quiet else level)


def log_event(event: MonitorEvent) -> None:
    """A line for what a monitor has found."""
    told = event.to_dict()
    LOGGER.warning("%s", told.pop("message"), extra={"fields": {"event": f"monitor {told.pop('kind')}", **told}})
