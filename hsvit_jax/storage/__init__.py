"""Object stores, by URL: gs://, s3:// and what else fsspec names."""

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
    "StorageError",
    "bucket",
    "explain",
    "filesystem",
    "is_final",
    "is_url",
    "whole_url",
    "within",
]
