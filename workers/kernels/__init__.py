"""Expert kernels: tiles of an expert, applied to rows of hidden states.

`c/` has them in C, a library for each kind of processor, and `native.py` calls those. `reference.py` does
the same with plain torch operations on any torch device: what every other kernel is tested against, and what
runs on a GPU without kernels.
"""
