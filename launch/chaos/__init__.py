"""Fault injection: processes killed, stopped and delayed, and hostile messages on every socket."""
