"""dpsweep: hyperparameter sweeps for training with differential privacy under a fixed epsilon."""

__version__ = "0.1.0"
