"""HSViT in JAX: horizontally scalable vision transformers for small data sets."""

__version__ = "0.1.0"
