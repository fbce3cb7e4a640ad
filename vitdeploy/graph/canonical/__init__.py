"""The canonical form: one pattern for each construct, whoever exported it; one rule of it a file, and a row of
`normalise.PASSES`. Changes when an exporter writes something new."""
