"""Measurements of the CUDA kernels."""
