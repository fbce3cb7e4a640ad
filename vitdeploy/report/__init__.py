"""The human-readable report: one self-contained HTML file made from report.json."""
