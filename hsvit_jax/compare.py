"""`python -m hsvit_jax.compare`: the same as `hsvit compare`."""

import sys

from hsvit_jax.main import main

if __name__ == "__main__":
    sys.exit(main(command="compare"))
