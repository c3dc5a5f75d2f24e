"""Data sets that are given: arrays and examples from Python, Hugging Face data sets."""
