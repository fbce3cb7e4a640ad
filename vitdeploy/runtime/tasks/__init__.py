"""One module per task: its answer type, the reading of outputs, the comparison of two answers, and pictures."""
