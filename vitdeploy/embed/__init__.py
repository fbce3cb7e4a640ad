"""Embed a bundle in an app: write readable sources and layouts to build, edit and keep."""
