"""The recipe: a frozen, validated value, read from YAML. No field can name code, and nothing heavy is imported."""
