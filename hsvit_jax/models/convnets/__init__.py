"""Convolutional networks: backbones of HSViT and baselines beside it."""
