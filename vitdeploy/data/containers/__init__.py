"""Images that lie in tars, tables and behind URIs, read where they are."""
