"""Which requests run in the next step: jobs, the waiting queue, the prefix cache."""
