"""A backbone for any family on transformers' own modules. What differs between families is found by
evaluating their modules when a model is loaded (docs/architecture.md)."""
