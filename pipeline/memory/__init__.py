"""The memory that an engine needs, and the plan that fits it to the machine."""
