"""Processes that compute and copy tiles. They know no model and no policy."""
