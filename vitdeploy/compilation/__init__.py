"""Compiles the placement of one target to what its runtime loads, and records what really ran."""
