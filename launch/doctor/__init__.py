"""`launch.py doctor`: one module for each thing that it looks at. Imports no torch.

Modules that read /proc and /sys take the root of the file system, so that another machine's can be read too;
what cannot be read is unknown, never an error.
"""
