"""`launch.py stress`: many clients at once, and every answer compared with the same request alone."""
