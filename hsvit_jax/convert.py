"""`python -m hsvit_jax.convert`: see `hsvit_jax.commands.convert`."""

import sys

from hsvit_jax.runtime import program

program.prepare("hsvit_jax.convert", __name__, huge_pages=False)

from hsvit_jax.commands.convert import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
