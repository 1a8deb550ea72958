"""`launch.py stress`: many concurrent clients, and every answer compared with the same request run alone."""
