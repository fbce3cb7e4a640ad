"""One file for each model: its size, its loss and its metric. `loop.py` is what they share.

The models are transformers' own classes, trained from random weights and saved with `save_pretrained`.
"""
