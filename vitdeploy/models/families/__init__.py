"""Built-in architecture families, each a row of the catalog."""
