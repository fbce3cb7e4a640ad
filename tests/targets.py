"""Targets that every machine has: those of the CPU. What needs a GPU is tested in tests/gpu."""

from vitdeploy.backends import TARGETS

CPU_TARGETS = {name: row for name, row in TARGETS.items() if row.device == "CPU"}
