"""The store of finished stages: keys, atomic publishing, verification on reading."""
