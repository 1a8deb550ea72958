"""The user's side: the command line, the supervisor, the chat. Imports no torch."""
