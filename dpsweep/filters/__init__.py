"""Causal maps of the released stream: post-processing, free of privacy cost."""
