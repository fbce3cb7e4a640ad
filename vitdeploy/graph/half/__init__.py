"""Half precision that stands in the graph: which type every tensor has, and how such a graph is evaluated on a CPU."""
