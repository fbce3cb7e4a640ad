"""A bundle on a series of a runtime's releases, each in an environment of its own."""
