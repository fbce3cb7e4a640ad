"""Architectures in PyTorch, each written to be read as its paper's specification."""
