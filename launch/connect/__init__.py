"""A command's client of a new or a running engine, also across a restart of the coordinator."""
