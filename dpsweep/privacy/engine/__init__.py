"""Engines: ways to get the clipped sum of a query's answers. All give the same sum."""
