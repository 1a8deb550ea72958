"""The coordinator's services: clients and their sockets, the engine's thread, and the parts of the engine."""
