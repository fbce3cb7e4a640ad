"""The type and shape of every value, up to free sizes. Changes with ONNX's operators."""
