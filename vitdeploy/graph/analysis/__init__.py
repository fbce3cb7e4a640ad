"""Analyse a graph without changing it: linears, attention, tokens, the residual stream, work. Changes when models have
new structures to find."""
