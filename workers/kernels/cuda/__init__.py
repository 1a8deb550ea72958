"""Expert kernels in CUDA C, for tiles in the store's own bytes, and what compiles and launches them.

`*.cu` and `*.cuh` have the kernels; `device.cuh` says what they need of a GPU. `compiler.py` compiles them
for the GPU at hand, `launcher.py` starts them there, `experts.py` and `matrix.py` say what is launched.
"""
