"""Passes over ONNX graphs, on onnx_ir. No torch here."""
