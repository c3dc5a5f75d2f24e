"""Object stores, by URL: gs://, s3:// and what else fsspec names."""

from hsvit_jax.storage.mirror import Mirror, Mismatch, local, of, publish, shown
from hsvit_jax.storage.stores import (
    StorageError,
    bucket,
    explain,
    filesystem,
    is_final,
    is_url,
    whole_url,
    within,
)

__all__ = [
    "Mirror",
    "Mismatch",
    "StorageError",
    "bucket",
    "explain",
    "filesystem",
    "is_final",
    "is_url",
    "local",
    "of",
    "publish",
    "shown",
    "whole_url",
    "within",
]
