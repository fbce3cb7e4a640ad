"""INT8 quantization: observe tensors, derive ranges, and place Q/DQ for each target."""
