"""Measures the inputs of policies: a model's routing, sensitivities and gates, and the costs of its tiles."""

LEAST_TOKENS = 256  # of a text: with fewer, experts' shares are noise
LANES = 4  # windows that are decoded together
HELD_OUT = 5  # one of so many windows is for validation
