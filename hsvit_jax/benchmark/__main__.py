"""`python -m hsvit_jax.benchmark`: the same as `hsvit benchmark`."""

from hsvit_jax.main import main

if __name__ == "__main__":
    raise SystemExit(main(command="benchmark"))
