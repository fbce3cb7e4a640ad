"""A memory of results: rows of documents in Parquet files, and where a series of them changed."""
