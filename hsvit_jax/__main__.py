"""`python -m hsvit_jax`: the same as `hsvit`."""

import sys

from hsvit_jax.main import main

if __name__ == "__main__":
    sys.exit(main())
