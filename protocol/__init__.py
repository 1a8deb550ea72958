"""Messages between Tandem's processes and its clients. Knows no torch, no shared memory, no model."""
