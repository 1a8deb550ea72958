"""The chat in a terminal, and line by line from a pipe: `launch.py` alone and `launch.py chat`."""
