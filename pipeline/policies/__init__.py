"""Policies: what is resident, what the device computes. They see arrays and plan; they never touch a tensor.

`view.py` is the contract between the engine and a policy; `presets.py` is the one table of presets.
"""
