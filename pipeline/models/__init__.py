"""Model families: each file holds what distinguishes one family, and the names of its checkpoint's tensors.

Nothing here imports torch, so the loader and the supervisor can describe a model without it. The computation
that all families share is in `pipeline/backbone/`.
"""
