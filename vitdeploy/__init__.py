"""vitdeploy: from a Vision Transformer checkpoint to a proven engine in one folder."""

__version__ = "0.1.0"
