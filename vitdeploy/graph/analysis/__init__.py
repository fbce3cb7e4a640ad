"""What is found in a graph, and nothing changed: linears, attention, tokens, the residual stream, work. Changes when
models have something new to find."""
