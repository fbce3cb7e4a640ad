"""Half precision as types in the graph: the type of every tensor, and the evaluation of such a graph on a CPU."""
