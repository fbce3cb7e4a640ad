"""Export from PyTorch to ONNX, with a check that both compute the same function."""
