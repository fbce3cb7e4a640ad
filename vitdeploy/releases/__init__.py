"""Run a bundle on several releases of a runtime, each in its own environment."""
