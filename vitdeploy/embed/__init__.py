"""Embeds a bundle in an app: writes sources and layouts that a person can read, build and keep."""
