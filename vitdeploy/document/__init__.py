"""The documents that commands write (report.json, tune.json and others) as frozen dataclasses.

They are written by `spec.encode` and read by `spec.decode`, which is strict: a missing or unknown key, or a value of
the wrong type, is an error with its path. docs/report.schema.json is the JSON Schema of report.json.
"""
