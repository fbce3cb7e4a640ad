"""The stages of the pipeline. Each is a function of its inputs and config that fills a folder.

No stage reads the store, the environment or the command line; the pipeline and the commands call the same functions.
For a model with several graphs (an encoder-decoder), every folder has one file `<graph>.onnx` per graph.
"""
