"""`python -m hsvit_jax`: the same as `hsvit`."""

from hsvit_jax.main import main

if __name__ == "__main__":
    raise SystemExit(main())
