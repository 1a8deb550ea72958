"""Traces: the routing of a run in a file (docs/traces.md has every byte), written by `--record` and read back
for `bench --replay`. Independent of the engine and of torch."""
