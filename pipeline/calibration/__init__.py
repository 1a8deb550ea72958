"""Finding out about a model what policies plan with: routing, sensitivities, gates."""
