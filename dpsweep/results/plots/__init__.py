"""Pictures of a sweep, each a pure function of what is known of its trials."""
