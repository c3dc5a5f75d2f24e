"""`python -m hsvit_jax.compare`: see `hsvit_jax.commands.compare`."""

import sys

from hsvit_jax.runtime import program

program.prepare("hsvit_jax.compare", __name__)

from hsvit_jax.commands.compare import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
