"""The commands that score given text: `score`, and `evaluate` for multiple-choice items."""
