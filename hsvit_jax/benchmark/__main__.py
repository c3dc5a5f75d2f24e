"""`python -m hsvit_jax.benchmark`: the same as `hsvit benchmark`."""

import sys

from hsvit_jax.main import main

if __name__ == "__main__":
    sys.exit(main(command="benchmark"))
