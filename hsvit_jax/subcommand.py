"""The command lines beside the trainer's: flags of their own, and `--config.KEY=VALUE` words."""

import sys
from collections.abc import Callable

from absl import flags


class Misuse(ValueError):
    """A command line that asks for nothing that could be done."""


def run(
    usage: str,
    values: flags.FlagValues,
    work: Callable[[list[str], list[str]], int],
    argv: list[str] | None,
) -> int:
    """Reads the flags into `values`, does the work and returns the exit code.

    usage: what --help says before the flags. work: (words that are no flags, KEY=VALUE settings) →
    exit code. What flags or work refuse as misuse is told with the usage, exit code 2; another
    ValueError alone, exit code 1.
    """
    argv = list(sys.argv if argv is None else argv)
    if "--help" in argv:
        print(f"{usage}\n{values.get_help()}")
        return 0
    settings = [w.removeprefix("--config.") for w in argv if w.startswith("--config.")]
    try:
        words = values([w for w in argv if not w.startswith("--config.")])[1:]
        return work(words, settings)
    except (flags.Error, Misuse) as error:
        return fail(f"{error}\n\n{usage}", 2)
    except ValueError as error:
        return fail(str(error), 1)


def refuse_words(words: list[str]) -> None:
    """For a command that takes flags only: `Misuse` if there are other words."""
    if words:
        raise Misuse(f"unexpected words {words}: flags are --name=value")


def fail(text: str, code: int) -> int:
    """Says why on standard error; the exit code."""
    print(text, file=sys.stderr, flush=True)
    return code
