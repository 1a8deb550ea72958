"""A layer's experts: divided between host and device, computed by workers, cached and fetched as tiles."""
