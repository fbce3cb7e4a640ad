"""Image folders, their labels and their splits. A tool of the stages; no torch."""
