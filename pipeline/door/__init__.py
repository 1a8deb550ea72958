"""The door for clients over tcp: a process of its own, so that no stranger reaches the coordinator."""
