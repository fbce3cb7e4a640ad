"""Images in tars, tables and at URIs, read in place."""
