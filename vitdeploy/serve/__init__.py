"""An HTTP server of one bundle: the Open Inference Protocol v2, and images in, answers out."""
