"""`launch.py cache`: lists and removes the files kept on disk and in shared memory."""
