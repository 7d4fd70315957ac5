"""What every room may use: types of the privacy boundary, errors, seeds, strict configs."""
