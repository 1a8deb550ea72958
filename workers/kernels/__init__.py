"""Expert kernels: tiles of an expert, applied to rows of hidden states.

`reference.py` does it with plain torch operations on any torch device. It is what every faster kernel is
tested against.
"""
