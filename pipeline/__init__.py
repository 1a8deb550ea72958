"""The engine: model, device, caches, policies and the coordinator process."""
