"""Array functions: jax only, no modules and no parameters."""
