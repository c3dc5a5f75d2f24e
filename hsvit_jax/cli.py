"""The command line: argv to a request, mistakes and signals to exit codes; it knows no mode.

Exit codes: 0 done, 1 a mistake in the request or its data, 2 in the command line, 3 training
diverged, 42 saved after SIGTERM or SIGHUP, 75 stalled (see `runtime.watchdog`), 130 stopped by
Ctrl-C, 141 the reader of a pipe is gone.
"""

import contextlib
import errno
import functools
import importlib
import os
import shlex
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_collections
from absl import flags

from hsvit_jax import config as config_lib
from hsvit_jax import report
from hsvit_jax.runtime import signals

_MISTAKE, _USAGE, _DIVERGED, _CTRL_C, _PIPE = 1, 2, 3, 130, 141

# Errors of the machine rather than of the program: one line says it all.
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)

#: For `Mode.config`: every key of the configuration is read, and --config is required.
EVERYTHING = "*"


class Misuse(ValueError):
    """A command line that asks for nothing that could be done: exit code 2."""


@dataclass(frozen=True)
class Mode:
    """One row of a program's table of modes: the input of a mode. All other input is refused.

    Attributes:
      module: of `hsvit_jax.commands`, whose `run(request)` returns the exit code.
      flags: names of flags, beside --mode and --config, separated by blanks.
      config: sections and keys of the configuration, separated by blanks. A mode with the flag
        `checkpoint` may be given a configuration in its place, which then names the run.
      files: whether words that are no flags are accepted, as names of files.
    """

    module: str
    flags: str
    config: str = ""
    files: bool = False

    def reads_flag(self, flag: str) -> bool:
        """Whether the mode reads a flag, such as 'workdir'."""
        return flag in self.flags.split()

    def reads_key(self, key: str) -> bool:
        """Whether the mode reads a configuration key, such as 'train.batch'."""
        return not {EVERYTHING, key, key.partition(".")[0]}.isdisjoint(self.config.split())

    @property
    def finds_run(self) -> bool:
        """Whether the mode works on a finished run rather than on a configuration."""
        return self.reads_flag("checkpoint")


@dataclass(frozen=True)
class Request:
    """A parsed command line.

    Attributes:
      flags: the flags' values.
      spec: the text of --config.
      settings: its KEY=VALUE overrides.
      config: the configuration of both; None where only the texts are wanted.
      words: all that is no flag, such as names of files.
      command: the whole command line, to be given again.
    """

    flags: flags.FlagValues
    spec: str
    settings: list[str]
    config: ml_collections.ConfigDict | None
    words: list[str]
    command: list[str]

    @property
    def workdir(self) -> str:
        """The folder given, or the configuration's default."""
        settings = self.config, self.spec, self.settings
        return self.flags.workdir or config_lib.default_workdir(*settings)


def run(
    argv: list[str] | None,
    usage: str,
    table: Iterable[tuple],
    work: Callable[[Request], int | None] | None = None,
    modes: Mapping[str, Mode] = MappingProxyType({}),
) -> int:
    """Parses the command line, does the work, and returns the exit code.

    Args:
      argv: the command line, the program's name first; None for that of this process.
      usage: the first lines of --help; the first is 'usage: python -m MODULE ...'.
      table: the flags besides --config, see `make_flags`.
      work: returns the exit code, None for 0. A user's mistake that it raises becomes one line on
        standard error; a bug keeps its traceback.
      modes: instead of `work`; --mode names one of them. Input that it does not read is refused.
    """
    argv = sys.argv if argv is None else argv
    command = [*usage.split()[1:4], *argv[1:]]
    if len(argv) == 1 and modes:
        return _exit_code(lambda: print(usage), command, note) or _USAGE
    values = make_flags(table)
    spec, settings, rest, wants_help = _split_config(argv[1:])
    try:
        words = values([argv[0], *rest])[1:]
        reads_config = spec is not None and (modes or wants_help)
        config = config_lib.get_config(spec, *settings) if reads_config else None
        if wants_help:
            return _exit_code(lambda: print(_help(usage, values, modes, config)), command, note)
        request = Request(values, spec or "", settings, config, words, command)
        if modes:
            refuse_unused(request, modes)
            work = importlib.import_module(f"hsvit_jax.commands.{modes[values.mode].module}").run
    except (flags.Error, ValueError) as error:
        return _misused(error, command)
    # Late: it imports jax, which the returns above need not wait for.
    from hsvit_jax.runtime import coordination

    signals.raise_on_ctrl_c()
    with _plain_warnings(coordination.is_lead):
        call = functools.partial(work, request)
        return coordination.leave(_exit_code(call, command, coordination.print_once))


def make_flags(table: Iterable[tuple]) -> flags.FlagValues:
    """Defines flags in a set of their own, so that those of a notebook stay untouched.

    Args:
      table: a row for each flag: `flags.DEFINE_...` of absl and its arguments.
    """
    values = flags.FlagValues()
    values.set_gnu_getopt(True)  # flags may come after names of files
    for define, *arguments in table:
        define(*arguments, flag_values=values)
    return values


def refuse_unused(request: Request, modes: Mapping[str, Mode]) -> None:
    """Raises `Misuse` for input that the mode does not read, and for a missing configuration.

    Overrides that name a run are read where the run is found by its configuration.
    """
    values, name = request.flags, request.flags.mode
    mode, given = modes[name], {flag for flag in values if values[flag].present}
    for flag in sorted(given - {"mode", *mode.flags.split()}):
        readers = "|".join(other for other in modes if modes[other].reads_flag(flag))
        raise Misuse(
            f"--mode={name} does not use --{flag}, which is for --mode={readers}: leave it out"
        )
    if request.words and not mode.files:
        readers = " and ".join(f"--mode={other}" for other in modes if modes[other].files)
        raise Misuse(
            f"unexpected words: {' '.join(request.words)} (flags are --name=value; only {readers} "
            "take files)"
        )
    named = given & {"checkpoint", "workdir"} if mode.finds_run else set()
    if len(named) == 2:
        raise Misuse("--checkpoint and --workdir both name the run: leave one out")
    if request.config is None:
        if request.settings or not mode.finds_run:
            why = f"--config.{request.settings[0]}" if request.settings else f"--mode={name}"
            raise Misuse(f"{why} needs --config=FILE")
    elif named and not mode.config:
        raise Misuse(f"--mode={name} does not use --config beside --{named.pop()}: leave one out")
    by_config = mode.finds_run and not named
    for key in (setting.partition("=")[0] for setting in request.settings):
        if not (mode.reads_key(key) or (by_config and config_lib.names_run(key))):
            read = config_lib.few(mode.config.split())
            raise Misuse(
                f"--mode={name} does not use --config.{key}: leave it out (keys that it reads: "
                f"{read})"
            )


def refuse_words(request: Request) -> None:
    """Raises `Misuse` for words that are no flags, in a program that takes none."""
    if request.words:
        raise Misuse(f"unexpected words: {' '.join(request.words)} (flags are --name=value)")


def _split_config(words: list[str]) -> tuple[str | None, list[str], list[str], bool]:
    """(--config, its overrides as KEY=VALUE, all other words, whether help is asked for)."""
    spec, settings, rest, wants_help = None, [], [], False
    waiting = iter(words)
    for word in waiting:
        if word == "--":
            rest += [word, *waiting]
            break
        text = word.lstrip("-") if word.startswith("-") else ""
        name = text.partition("=")[0]
        if name in ("help", "h", "helpshort", "helpfull"):
            wants_help = True
        elif name == "config" or name.startswith("config."):
            if "=" not in text:
                text += "=" + next(waiting, "")
            if name == "config":
                spec = text.removeprefix("config=")
            else:
                settings.append(text.removeprefix("config."))
        else:
            rest.append(word)
    return spec, settings, rest, wants_help


def _help(
    usage: str,
    values: flags.FlagValues,
    modes: Mapping[str, Mode],
    config: ml_collections.ConfigDict | None,
) -> str:
    """The usage, every flag with the modes that read it, and every key of the configuration."""
    lines = [usage, "", "Flags, and the modes that use them:" if modes else "Flags:"]
    for flag in (values[name] for name in values):
        default = "..." if flag.default is None else flag.default_as_str.strip("'")
        readers = ", ".join(name for name in modes if modes[name].reads_flag(flag.name))
        prefix = f"{readers}: " if readers else ""
        lines.append(f"  {f'--{flag.name}={default}':<19} {prefix}{flag.help}")
    if config is not None:
        lines += ["", "Configuration (value as it stands):", config_lib.describe(config)]
    return "\n".join(lines)


def _exit_code(
    work: Callable[[], int | None], command: list[str], print_line: Callable[[str], None]
) -> int:
    """Does the work, and turns every end that is no bug into a line and an exit code."""
    try:
        code = work() or 0
        sys.stdout.flush()
        return code
    except signals.Interrupted as stop:
        again = shlex.join(command)
        print_line(f"{stop}; saved. To go on, give the same command again:\n  {again}")
        return stop.exit_code
    except KeyboardInterrupt:
        print_line(signals.NOTHING_SAVED)
        return _CTRL_C
    except signals.Diverged as error:
        print_line(str(error))
        return _DIVERGED
    except Misuse as error:
        return _misused(error, command)
    except BrokenPipeError:  # `| head` has seen enough
        _drop_output()
        return _PIPE
    except ValueError as error:
        if not _is_ours(error):
            raise
        print_line(report.printable(str(error)))
        return _MISTAKE
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        _drop_output()
        print_line(report.printable(f"{error.strerror}: {error.filename or 'writing'}"))
        return _MISTAKE


def _misused(error: Exception, command: list[str]) -> int:
    note(f"{error}\n(see: {shlex.join(command[:3])} --help)")
    return _USAGE


def note(text: str) -> None:
    """Prints a remark to standard error; standard output is for results."""
    print(report.printable(text), file=sys.stderr, flush=True)


def _drop_output() -> None:
    """Drops buffered output that could not be written, before Python tries again on exit."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def _plain_warnings(is_lead: Callable[[], bool]) -> Iterator[None]:
    """Prints this package's warnings in one line, without a place in the source."""

    def show(
        message: Warning | str, category: type[Warning], filename: str, *rest: Any, **more: Any
    ) -> None:
        if category.__module__.startswith("hsvit_jax") or "hsvit_jax" in Path(filename).parts:
            if is_lead():
                note(f"warning: {message}")
        else:
            before(message, category, filename, *rest, **more)

    before = warnings.showwarning
    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before


def _is_ours(error: ValueError) -> bool:
    """Whether this package raised the error, for the user to read; one from elsewhere is a bug."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__", "").startswith("hsvit_jax")
