"""Rewrites of a canonical graph for faster engines; those that a recipe can select are rows of `optimize.REWRITES`.
Changes when a new rewrite pays off."""
