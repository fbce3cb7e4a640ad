"""Many recipes: what they share is made once, what is measured has a machine for itself, and one table of all."""
