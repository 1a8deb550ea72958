"""Everything but the experts: embeddings, attention, norms, routers, shared experts and the KV cache."""
