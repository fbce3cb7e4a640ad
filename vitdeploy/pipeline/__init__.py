"""Recipe -> plan of stages -> run. The pipeline owns the store, the environment and the order of things."""
