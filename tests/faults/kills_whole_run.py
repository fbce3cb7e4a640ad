"""Figure: SIGKILL at any moment of a whole run; apart from `kills`, as each takes an hour in the full form."""

from tests.faults.kills import run_whole as run

__all__ = ["run"]
