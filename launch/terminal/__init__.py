"""What a command prints, its progress displays, and Ctrl-C."""
