"""Names of tensors and architectures in other libraries, and their equivalents here."""
