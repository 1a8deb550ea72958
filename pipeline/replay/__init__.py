"""Replays a trace under any policy, without the model: the policy plans as in the engine, and its plans are
timed with measured or published costs."""
