"""The program `hsvit`; `python -m hsvit_jax` and `python -m hsvit_jax.main` are the same."""

import gc

from hsvit_jax.runtime import cpu, signals


def main(argv: list[str] | None = None, command: str = "") -> int:
    """Runs a command line and returns its exit code.

    Args:
      argv: the program's name and all words; None takes those of this process and sets it up.
      command: a name of `commands.COMMANDS`, if the words do not begin with one.
    """
    if argv is None:
        signals.prepare_process()  # first: Ctrl-C may come during the imports
        cpu.check_address_space()
        cpu.use_huge_pages()
        # Imports and tracing make objects that last. Looking through them for cycles as often as
        # Python does took 0.4 of 3.1 s of its time to a first step.
        gc.set_threshold(10_000)
    cpu.prepare()  # before jax is imported
    from hsvit_jax import cli, commands

    return cli.run(argv, commands.COMMANDS, commands.ABOUT, command)


if __name__ == "__main__":
    raise SystemExit(main())
