"""An HTTP server for one bundle: the Open Inference Protocol v2, and predictions for image files."""
