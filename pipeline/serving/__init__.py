"""The coordinator's services: clients and their sockets, the engine's thread, and what is built in it."""
