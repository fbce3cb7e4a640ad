"""What other libraries call tensors and architectures, and what these are here."""
