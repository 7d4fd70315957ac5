"""Types of the privacy boundary, errors, seeds, strict configs."""

__version__ = "0.1.0"
