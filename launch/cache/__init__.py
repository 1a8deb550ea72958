"""`launch.py cache`: what is kept on disk and in shared memory, and removing what is not needed."""
