"""Model repositories for inference servers: the engine, its settings from the bench, a client with the golden answers.

`layout` is shared; one module for each server writes the rest.
"""
