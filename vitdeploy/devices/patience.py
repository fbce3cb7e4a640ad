"""How long a device is waited for, and how much it may say: every conversation ends, by its answer or by one of these.

The agent beats while it works or waits (agent/beat.py), so long work is no silence.
"""

from __future__ import annotations

from dataclasses import dataclass

from vitdeploy.devices.agent.beat import BEAT

# What one conversation may write to standard error, and say besides its answers: beats, statuses, whom it waits for.
MAX_ERROR_BYTES = 64 << 20
MAX_TALK_BYTES = 64 << 20
# How often a wait is looked at: a cancelled one ends after so many seconds.
LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Patience:
    """Seconds, but for `rate` and `mute`.

    greeting: until the agent has greeted: the login, and the start of a Python on a slow board.
    silence: without a byte in or out. told: after so long a silence, and again after as much, the user hears of it.
    rate: the least bytes a second of a message or of what is sent, counted from `silence` seconds after it began.
    answer, probe: until an answer, of an agent that beats; a probe loads every runtime.
    queue: until it is this one's turn. work: of a job, or until an engine has been built or has answered.
    stop: of each word with a device after an interrupt, or with one that has done its work.
    end: until the process here has ended that has said all.
    lost: how long a device may be out of reach, from when a connection broke.
    mute: how often in a row its agent may stop speaking.
    first_retry, last_retry: between two attempts, doubled each time.
    """

    greeting: float = 60.0
    silence: float = 60.0
    told: float = 30.0
    rate: float = 20e3  # a bad mobile link
    answer: float = 120.0
    probe: float = 300.0
    queue: float = 3600.0
    work: float = 36 * 3600.0  # a bench may sustain a load for 24 hours
    stop: float = 20.0
    end: float = 10.0
    lost: float = 600.0
    mute: int = 3
    first_retry: float = 1.0
    last_retry: float = 30.0


PATIENCE = Patience()


class Clock:
    """What one wait for bytes has taken so far. Only time in which nothing could be done but wait counts: not that in
    which this process was busy, stopped or suspended."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._within = patience.greeting
        self._answer = self._message = self._silence = 0.0
        self._bytes = 0

    def expect(self, within: float) -> None:
        """Begin to wait for an answer, for `within` seconds at most."""
        self._within, self._answer = within, 0.0
        self.begin()

    def begin(self) -> None:
        """Begin with the next message of an answer: a line, or a file."""
        self._message, self._bytes = 0.0, 0

    def passed(self, count: int) -> None:
        """So many bytes came, or were taken."""
        self._bytes += count

    def waited(self, seconds: float, ready: bool) -> float:
        """So much more time passed until bytes could pass, or was looked at: a longer one was no wait. Gives the
        seconds of silence to tell of now, 0 for nothing new."""
        seconds = min(seconds, 2 * LOOK_SECONDS)
        self._message += seconds
        if self._bytes <= len(BEAT) + 1:  # then something comes that is no beat, whose rate counts
            self._answer += seconds
        before = self._silence
        self._silence = 0.0 if ready else before + seconds
        told = self._patience.told
        return self._silence if self._silence // told > before // told else 0.0

    def overdue(self) -> tuple[str, str] | None:
        """What was found and what is wanted, where the wait is over."""
        patience = self._patience
        if self._silence >= patience.silence:
            return f"no word for {self._silence:,.0f} s", f"one within {patience.silence:,.0f} s"
        if self._bytes < patience.rate * (self._message - patience.silence):
            return f"{self._bytes:,} bytes in {self._message:,.0f} s", f"at least {patience.rate:,.0f} bytes a second"
        if self._answer >= self._within:
            return f"signs of life for {self._answer:,.0f} s, and no answer", f"one within {self._within:,.0f} s"
        return None


def spelled(seconds: float) -> str:
    """ "20 s", "10 min", "36 h": a limit, for a person."""
    for unit, name in ((3600, "h"), (60, "min")):
        if seconds >= unit and seconds % unit == 0:
            return f"{seconds / unit:,.0f} {name}"
    return f"{seconds:,.3g} s"
