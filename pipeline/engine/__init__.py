"""One step through the model under a policy, and those that observe it."""
