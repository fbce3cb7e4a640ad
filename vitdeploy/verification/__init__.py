"""Does the engine still give the original's answers? Agreement, accuracy with intervals, gates."""
