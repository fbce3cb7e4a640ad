"""Analyse and rewrite ONNX graphs. `values.py` reads values, `edit.py` creates and changes nodes. Each part imports
only from those before it in this list: shapes, analysis, edit, io and canonical, passes and half."""
