"""The command line: its grammar, what the options mean together, and what is checked before a start."""
