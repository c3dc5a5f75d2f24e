"""`python -m hsvit_jax.compare`: see `hsvit_jax.commands.compare`."""

import sys

from hsvit_jax.runtime import signals

if __name__ == "__main__":
    signals.prepare_process()  # first: Ctrl-C may come during the imports

from hsvit_jax.runtime import compile_cache, cpu

if __name__ == "__main__":
    cpu.use_huge_pages("hsvit_jax.compare")
    compile_cache.remember_compilations()
cpu.prepare()  # before anything imports jax

from hsvit_jax.commands.compare import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
