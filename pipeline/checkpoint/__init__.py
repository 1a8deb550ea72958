"""Reading Hugging Face checkpoints without torch: which tensors there are, and their numbers."""
