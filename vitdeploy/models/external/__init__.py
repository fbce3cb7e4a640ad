"""External modules: timm's, transformers' and the user's own."""
