"""The border of a graph: files in and out, what may come in, metadata, inputs and outputs. Changes with ONNX's format,
and with what others write."""
