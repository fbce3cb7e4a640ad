"""Modules that are not ours: timm's, transformers', and the user's own."""
