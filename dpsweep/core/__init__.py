"""What every package may use: types of the privacy boundary, errors, seeds, strict configs."""
