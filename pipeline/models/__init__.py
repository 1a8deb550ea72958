"""Model families: each file has the particulars of one, and the names of its checkpoint's tensors. Without
torch, for the loader and the supervisor."""
