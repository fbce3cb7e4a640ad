"""Rewrite a graph into the canonical form: one pattern for each construct, whatever exported it. Each rule is a row of
`normalise.PASSES`. Changes when an exporter writes something new."""
