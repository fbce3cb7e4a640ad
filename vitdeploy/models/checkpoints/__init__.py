"""Weight files: read, unwrap, and load into a module or refuse."""
