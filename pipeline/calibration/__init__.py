"""Measures the inputs of policies: a model's routing, sensitivities and gates, and the costs of its tiles."""
