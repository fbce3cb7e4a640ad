"""A request that is answered with an error on purpose."""

from __future__ import annotations


class Refusal(Exception):
    """Ends a request with `status`; `message` goes to the client."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = headers or {}


def busy(message: str) -> Refusal:
    """Too much at once: the same request may succeed in a second."""
    return Refusal(429, message, {"retry-after": "1"})


def stopping() -> Refusal:
    return Refusal(503, "the server is stopping", {"retry-after": "1"})


class ClientGone(Exception):
    """Nobody waits for the answer any more."""
