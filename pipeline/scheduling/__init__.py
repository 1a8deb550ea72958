"""The scheduler of requests: jobs, the waiting queue, the prefix cache."""
