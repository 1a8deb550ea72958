"""Formats, tables and progress displays of the commands, and Ctrl-C."""
