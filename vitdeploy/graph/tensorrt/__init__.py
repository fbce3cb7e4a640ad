"""What TensorRT would say to a graph, without asking it: facts of its ONNX parser, rules over a prepared graph."""
