"""Connecting to a Ray cluster, embedded or existing."""
