"""Set-up of the program's process, to be called before anything heavy is imported."""

from hsvit_jax.runtime import cpu, signals


def prepare(is_process: bool) -> None:
    """Sets up signals, streams and memory before `import jax`.

    Args:
      is_process: whether the process is the program's own; else only the CPU back end is set up.
    """
    if is_process:
        signals.prepare_process()  # first: Ctrl-C may come during the imports
        cpu.use_huge_pages()
    cpu.prepare()
