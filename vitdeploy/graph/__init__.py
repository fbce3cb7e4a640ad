"""ONNX graphs: what stands in them, and rewrites. `values.py` reads one value, `edit.py` makes and changes nodes; each
room imports what is above it in this list: shapes, analysis, edit, io and canonical, passes and half."""
