"""Predicted cost of a configuration on many devices, and its check against compiled programs."""
