"""The dashboard: pages, and a stream of events about the engine. Served by the gateway."""
