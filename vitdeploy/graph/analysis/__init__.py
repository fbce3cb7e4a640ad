"""Find things in a graph without changing it: linears, attention, tokens, the residual stream, work. Changes when
models have something new to find."""
