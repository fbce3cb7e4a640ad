"""INT8: what is observed, which ranges follow, and where Q/DQ stands for each target."""
