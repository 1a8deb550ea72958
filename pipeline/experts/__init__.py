"""The experts of a layer: the split between host and device, worker pool, expert cache, tile fetches."""
