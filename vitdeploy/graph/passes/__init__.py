"""Rewrites of a canonical graph towards faster engines; each a file, and a row of `optimize.REWRITES` where a recipe
chooses it. Changes when there is something new to gain."""
