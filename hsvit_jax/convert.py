"""`python -m hsvit_jax.convert`: the same as `hsvit convert`."""

from hsvit_jax.main import main

if __name__ == "__main__":
    raise SystemExit(main(command="convert"))
