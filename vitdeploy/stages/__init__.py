"""The stages: each a function of its inputs and config that fills a folder.

None reads the store, the environment or the command line; the pipeline and the commands call the same functions. A
model of several graphs (an encoder-decoder) has a file `<graph>.onnx` for each, in every folder.
"""
