"""Traces: the routing of a run in a file (docs/traces.md has every byte), written by `--record` and read back
for `bench --replay`. Reading needs no engine, and nothing here torch."""
