"""Policies: they decide which tiles are resident and which the device computes. They plan with arrays and
never touch a tensor.

`view.py` is the contract between the engine and a policy; `presets.py` is the one table of presets.
"""
