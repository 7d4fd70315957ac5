"""The search space of a sweep: which keys vary, over what, and under which conditions."""
