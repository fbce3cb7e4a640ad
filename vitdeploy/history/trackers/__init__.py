"""Results for trackers of experiments, and for Bencher: what is sent, and one file for each place that takes it."""
