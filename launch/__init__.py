"""What a person starts: the command line, the supervisor, the chat. Imports no torch."""
