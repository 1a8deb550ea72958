"""The command line: its grammar, the meaning of its options, and the checks before a start."""
