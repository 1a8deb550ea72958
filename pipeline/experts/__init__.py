"""The experts of a layer: the split between host and device, the workers' pool, the expert cache, tile
fetches."""
