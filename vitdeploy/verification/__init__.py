"""Compares an engine's answers with the original's: agreement, accuracy with intervals, gates."""
