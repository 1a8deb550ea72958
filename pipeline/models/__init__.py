"""Model architectures: one file each says what differs and its checkpoint's tensor names.

`spec.py` and `registry.py` import no torch, so that the loader and the supervisor can ask about a model
without it; `backbone.py` is the computation all architectures share.
"""
