"""`launch.py doctor`: facts about this machine, and whether a model fits it. Imports no torch."""
