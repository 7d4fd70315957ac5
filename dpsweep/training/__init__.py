"""Training one config. Everything here and below runs with torch alone."""
