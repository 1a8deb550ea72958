"""Shared memory: segments, the store of all experts, the slab. Knows no ZeroMQ, no torch, no model."""
