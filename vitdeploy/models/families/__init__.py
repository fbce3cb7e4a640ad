"""What is known of each architecture of ours: a row of the catalog."""
