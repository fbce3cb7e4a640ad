"""The documents that commands write (report.json, tune.json and their kind) as frozen dataclasses.

They are written by `spec.encode` and read by `spec.decode`, which is strict: a key that is missing, unknown or of
another type is an error with its path.
docs/report.schema.json is report.json as JSON Schema.
"""
