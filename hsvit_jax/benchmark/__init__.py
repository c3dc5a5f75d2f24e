"""Measurements of speed and memory; `hsvit benchmark` is the command."""
