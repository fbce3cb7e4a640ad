"""The passes that bring a graph into the canonical form, one rule of it a file; `graph/normalise.py` runs them."""
