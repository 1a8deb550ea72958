"""`launch.py calibrate`."""
