"""Where finished stages are kept: keys, atomic publishing, verification when read."""
