"""What is shown and exported when a search is through."""
