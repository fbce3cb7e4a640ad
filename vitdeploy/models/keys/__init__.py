"""Map tensor names and architecture names of other libraries to ours."""
