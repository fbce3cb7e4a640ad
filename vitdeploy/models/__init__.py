"""Architectures in PyTorch, checkpoint readers, the reference runner."""
