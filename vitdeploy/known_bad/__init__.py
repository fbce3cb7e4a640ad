"""Runtimes that are known to compute some graphs wrongly, without an error: of what release, and the way out."""
