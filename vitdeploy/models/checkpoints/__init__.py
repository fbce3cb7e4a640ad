"""Files of weights: read, unwrapped, and loaded into a module or refused."""
