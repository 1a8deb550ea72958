"""The supervisor: starts, monitors, restarts and stops an engine's processes."""
