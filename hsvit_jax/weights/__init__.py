"""Trained weights: files of them, their layouts, and how they are made to fit a network."""
