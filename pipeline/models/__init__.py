"""Model families: each file has the particulars of one family and the names of its checkpoint's tensors.

This package does not import torch, so the loader and the supervisor can describe a model without it. The
computation that all families share is in `pipeline/backbone/`.
"""
