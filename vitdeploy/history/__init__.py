"""A history of results: rows of documents in Parquet files, and changes in their series."""
