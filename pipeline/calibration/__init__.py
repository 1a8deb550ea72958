"""Measures what policies plan with: a model's routing, sensitivities and gates, and the costs of its
tiles."""
