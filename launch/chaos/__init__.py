"""Faults on purpose: processes killed, stopped and held up, and hostile messages on every socket."""
