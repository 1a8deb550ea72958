"""A command's client of an engine: its own or a running one, also across the engine's restart."""
