"""The files next to the weights in a model's folder, local or on a hub."""
