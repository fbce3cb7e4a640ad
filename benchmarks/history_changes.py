"""How often `vitdeploy history` finds a change, and how often it sees one where there is none, on simulated series.

    PYTHONPATH=. python benchmarks/history_changes.py

Log-normal noise, white and with a correlation that decays; three of a hundred results are 10 to 40 % longer. The change
is a slowdown after two thirds of the results.
"""

from __future__ import annotations

from tests.history.made import latencies
from vitdeploy.history.changes import find_changes

SERIES = 200
SLOWDOWN = 1.05
# Deviation of single results, what the correlation decays by, and the share of the variance that is correlated.
NOISES = {
    "2 %, white": (0.02, 0.0, 0.0),
    "4 %, white": (0.04, 0.0, 0.0),
    "3 %, half of it correlated by 0.5": (0.03, 0.5, 0.5),
    "2 %, half of it correlated by 0.8": (0.02, 0.8, 0.5),
    "3 %, most of it correlated by 0.9": (0.03, 0.9, 0.7),
}
SIZES = (12, 30, 100, 300)
BESIDE = 1


def main() -> None:
    print("| results | noise | false alarms | found | within one result |\n|---|---|---|---|---|")
    for size in SIZES:
        for name, noise in NOISES.items():
            false = sum(bool(find_changes(latencies(seed, size, *noise))[0]) for seed in range(SERIES))
            at, found, exact = 2 * size // 3, 0, 0
            for seed in range(SERIES, 2 * SERIES):
                changes, _ = find_changes(latencies(seed, size, *noise, at=at, factor=SLOWDOWN))
                beside = [abs(change.first - at) for change in changes]
                found += any(each <= 10 for each in beside)
                exact += any(each <= BESIDE for each in beside)
            shares = " | ".join(f"{100 * count / SERIES:.1f} %" for count in (false, found, exact))
            print(f"| {size} | {name} | {shares} |", flush=True)


if __name__ == "__main__":
    main()
