"""How we measure: one process per artifact from the start, alternating in blocks, never two runtimes in one process."""
