"""Static linter for TensorRT: finds what its parser and builder would reject, run slowly or leave unfused, by
documented facts. The facts change with TensorRT's releases. Rules are grouped in files by topic."""
