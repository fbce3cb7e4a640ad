"""PyTorch -> ONNX, and the proof that both are the same function."""
