"""Data sets and the models trained on them."""
