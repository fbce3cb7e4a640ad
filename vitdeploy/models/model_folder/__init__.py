"""What lies beside weights in a model's folder, here or on a hub."""
