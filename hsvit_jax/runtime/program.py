"""Set-up of a program's process, to be called before anything heavy is imported."""

from hsvit_jax.runtime import compile_cache, cpu, signals


def prepare(
    module: str, name: str, *, huge_pages: bool = True, compilation_cache: bool = True
) -> None:
    """Sets up signals, streams, memory and the compilation cache before `import jax`.

    Args:
      module: the calling module, as `python -m` names it.
      name: its `__name__`: where it is imported, only the CPU back end is set up.
      huge_pages: start the program anew with huge pages, where there are any.
      compilation_cache: keep compiled programs for the next start.
    """
    if name == "__main__":
        signals.prepare_process()  # first: Ctrl-C may come during the imports
        if huge_pages:
            cpu.use_huge_pages(module)
        if compilation_cache:
            compile_cache.remember_compilations()
    cpu.prepare()
