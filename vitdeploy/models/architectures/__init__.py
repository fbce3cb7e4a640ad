"""Architectures in PyTorch, written to follow their papers closely."""
