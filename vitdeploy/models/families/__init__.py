"""Our architectures: a row of the catalog for each."""
