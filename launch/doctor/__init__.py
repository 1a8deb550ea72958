"""`launch.py doctor`: one module for each subject that it examines. Imports no torch. Modules that read /proc
and /sys take the root of the file system, so that tests can supply another machine's; a file that cannot be
read makes its fact unknown, never an error."""
