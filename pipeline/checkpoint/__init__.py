"""Reads Hugging Face checkpoints without torch: the list of their tensors, and the tensors' numbers."""
