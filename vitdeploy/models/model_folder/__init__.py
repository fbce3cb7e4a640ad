"""Read the files next to the weights in a model folder, local or on a hub."""
