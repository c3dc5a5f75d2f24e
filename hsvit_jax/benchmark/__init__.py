"""Measurements of speed and memory; `python -m hsvit_jax.benchmark` is the command."""
