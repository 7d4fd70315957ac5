"""From private examples to released gradients, and what that costs."""
