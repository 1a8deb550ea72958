"""`launch.py bench`: policies compared on one machine, one model and the same prompts, in one engine."""
