"""`python -m hsvit_jax.convert`: see `hsvit_jax.commands.convert`."""

import sys

from hsvit_jax.commands.convert import main

if __name__ == "__main__":
    sys.exit(main())
