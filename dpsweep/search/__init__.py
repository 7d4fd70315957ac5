"""Decide what the next trial tries, from the trials so far."""
