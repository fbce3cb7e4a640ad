"""Settings and logs of a server."""

import json
import logging
import sys
import time
from dataclasses import dataclass

from vitdeploy.runtime.monitor import MonitorEvent

# --- The limits of a server -------------------------------------------------------------------------------------------


MIB = 1024 * 1024


@dataclass(frozen=True)
class ServerSettings:
    """Limits of a server; times in seconds.

    `max_batch`: images per run and per request; `max_delay`: how long the first of them waits for others. `max_queue`:
    waiting and running requests; further ones are refused with a retry hint. `max_body`: bytes of one request;
    `buffered`: bytes of all requests that are being read or answered.

    `max_prompts`, `max_texts`: per request. `kept`: bytes of cached image embeddings.

    `header_time`, `body_time`: to receive the complete head and body of a request. `deadline`: from the complete
    request to its answer. `keep_alive`: how long a connection may be idle. `write_time`: to send the rest of an answer
    when the connection ends. `linger`: how long the rest of a refused body is discarded, so that the client reads the
    answer before the connection closes. `grace`: to answer accepted requests when the server stops.
    """

    max_batch: int = 8
    max_delay: float = 0.0
    max_queue: int = 256
    max_body: int = 16 * MIB
    buffered: int = 256 * MIB
    max_prompts: int = 64
    max_texts: int = 1000
    kept: int = 256 * MIB
    max_head: int = 16 * 1024
    connections: int = 512
    header_time: float = 10.0
    body_time: float = 30.0
    deadline: float = 30.0
    keep_alive: float = 75.0
    write_time: float = 30.0
    linger: float = 2.0
    grace: float = 30.0


# --- Logs: one JSON object per line on standard error -----------------------------------------------------------------


LOGGER = logging.getLogger("vitdeploy.serve")


class JsonFormatter(logging.Formatter):
    """Formats each record as JSON: "time" (UTC), "level", "message", the `fields` of `extra`, and the "trace" of an
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
    """Log requests and server messages to standard error; only warnings and errors with `quiet`."""
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
    """Log an event of a monitor."""
    fields = event.to_dict()
    LOGGER.warning("%s", fields.pop("message"), extra={"fields": {"event": f"monitor {fields.pop('kind')}", **fields}})
