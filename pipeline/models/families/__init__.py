"""Model families, a file each: what a family reads of config.json, and the names of its tensors."""
