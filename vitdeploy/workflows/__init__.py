"""Workflows: what commands do with pipelines, or parts of one. A file or folder serves one command, or a few."""
