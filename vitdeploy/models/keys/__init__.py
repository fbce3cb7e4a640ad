"""Checkpoint keys of other libraries: each reader recognises one style and renames it to the model's own names."""
