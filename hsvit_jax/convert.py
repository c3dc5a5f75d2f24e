"""`python -m hsvit_jax.convert`: the same as `hsvit convert`."""

import sys

from hsvit_jax.main import main

if __name__ == "__main__":
    sys.exit(main(command="convert"))
