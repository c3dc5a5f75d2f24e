"""Vision transformers of patches: ViT, DeiT, HVT and DHVT."""
