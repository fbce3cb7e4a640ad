"""Attention weights for an image: a graph run with them as outputs, and their rows as maps over patches."""
