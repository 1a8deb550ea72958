"""`launch.py advise`: which preset, cache and format for a model, on any machine."""
