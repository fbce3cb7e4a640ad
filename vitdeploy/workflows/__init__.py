"""What commands do with pipelines, or with parts of one. A file or folder is the work of one command, or of a few."""
