"""`python -m hsvit_jax.compare`: the same as `hsvit compare`."""

from hsvit_jax.main import main

if __name__ == "__main__":
    raise SystemExit(main(command="compare"))
