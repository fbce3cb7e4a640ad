"""Read, check, import and write graph files: admission, metadata, inputs and outputs. Changes with the ONNX format and
with what other exporters write."""
