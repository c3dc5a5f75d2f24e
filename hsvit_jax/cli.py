"""From argv to a request, and from mistakes and signals to exit codes; it knows no mode.

Exit codes: 0 done, 1 a mistake in the request or its data, 2 in the command line, 3 training
diverged, 42 stopped by SIGTERM or SIGHUP and saved, 75 stalled (see `watchdog`), 130 stopped by
Ctrl-C, 141 the reader of a pipe went away.
"""

import contextlib
import errno
import functools
import importlib
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
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

# What the machine refuses rather than the program: one line says it all.
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)

#: For `Mode.config`: every key of the configuration is read, and one must be given.
EVERYTHING = "*"


class Misuse(ValueError):
    """A command line that asks for nothing that could be done: exit code 2."""


@dataclass(frozen=True)
class Mode:
    """One row of the table of modes: what a mode reads. All else that is given is refused.

    Attributes:
      module: of `hsvit_jax.commands`, whose `run(request)` returns the exit code.
      flags: names of flags, beside --mode and --config, separated by blanks.
      config: sections and keys of the configuration, separated by blanks. A mode with the flag
        `checkpoint` may be given a configuration in its place, which then names the run.
      files: whether words that are no flags are taken, as names of files.
    """

    module: str
    flags: str
    config: str = ""
    files: bool = False

    def reads_key(self, key: str) -> bool:
        """Whether the mode reads a configuration key, such as 'train.batch'."""
        sections = self.config.split()
        return EVERYTHING in sections or key in sections or key.partition(".")[0] in sections

    @property
    def finds_run(self) -> bool:
        """Whether the mode works on a finished run rather than on a configuration."""
        return "checkpoint" in self.flags.split()


@dataclass(frozen=True)
class Request:
    """A parsed command line.

    Attributes:
      flags: the flags' values.
      spec: the text of --config.
      settings: its KEY=VALUE overrides.
      config: the configuration of both; None where only the texts are wanted.
      words: all that is no flag, such as names of files.
      again: the command, to be given once more.
    """

    flags: flags.FlagValues
    spec: str
    settings: list[str]
    config: ml_collections.ConfigDict | None
    words: list[str]
    again: list[str]

    @property
    def workdir(self) -> str:
        """The folder given, or the one that this configuration has by default."""
        settings = self.config, self.spec, self.settings
        return self.flags.workdir or config_lib.default_workdir(*settings)


def run(
    argv: list[str],
    usage: str,
    values: flags.FlagValues,
    work: Callable[[Request], int | None] | None = None,
    modes: Mapping[str, Mode] = MappingProxyType({}),
) -> int:
    """Parses `argv` into `values`, does the work, and returns the exit code.

    Args:
      argv: the command line, the program's name first.
      usage: help's first lines; the first is 'usage: python -m MODULE ...'.
      values: the flags besides --config.
      work: returns the exit code, None for 0. A user's mistake that it raises is one line and never
        a traceback; a bug still is one.
      modes: in place of `work`, of which --mode names one; what a mode does not read is refused.
    """
    again = [*usage.split()[1:4], *argv[1:]]
    if len(argv) == 1 and modes:
        return _guarded(again, lambda: print(usage), note) or _USAGE
    spec, settings, rest, wants_help = _separate(argv[1:])
    try:
        words = values([argv[0], *rest])[1:]
        named = spec is not None and (modes or wants_help)
        config = config_lib.get_config(spec, *settings) if named else None
        if wants_help:
            return _guarded(again, lambda: print(_help(usage, values, modes, config)), note)
        request = Request(values, spec or "", settings, config, words, again)
        if modes:
            refuse_unused(request, modes)
            work = importlib.import_module(f"hsvit_jax.commands.{modes[values.mode].module}").run
    except (flags.Error, ValueError) as error:
        return _misused(error, again)
    # Late: it imports jax, which the ends above need not wait for.
    from hsvit_jax.runtime import coordination

    signals.raise_on_ctrl_c()
    with _plain_warnings(coordination.is_lead):
        return coordination.leave(
            _guarded(again, functools.partial(work, request), coordination.print_once)
        )


def refuse_unused(request: Request, modes: Mapping[str, Mode]) -> None:
    """Raises `Misuse` for whatever is given and not read, and for a configuration that is missing.

    Settings that name a run are read where the run is found by its configuration.
    """
    values, name = request.flags, request.flags.mode
    mode, given = modes[name], {flag for flag in values if values[flag].present}
    for flag in sorted(given - {"mode", *mode.flags.split()}):
        others = [other for other in modes if flag in modes[other].flags.split()]
        raise Misuse(
            f"--mode={name} does not use --{flag}, which is for --mode={'|'.join(others)}: leave "
            "it out"
        )
    if request.words and not mode.files:
        takers = " and ".join(f"--mode={other}" for other in modes if modes[other].files)
        raise Misuse(
            f"unexpected words: {' '.join(request.words)} (flags are --name=value; only {takers} "
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
    for key in (setting.partition("=")[0] for setting in request.settings):
        names_run = mode.finds_run and not named and config_lib.names_run(key)
        if not (mode.reads_key(key) or names_run):
            read = mode.config.replace(" ", ", ") or "none"
            raise Misuse(
                f"--mode={name} does not use --config.{key}: leave it out (keys that it reads: "
                f"{read})"
            )


def _separate(words: list[str]) -> tuple[str | None, list[str], list[str], bool]:
    """(--config, its overrides as KEY=VALUE, all other words, whether help is asked for)."""
    spec, settings, rest, wants_help = None, [], [], False
    waiting = iter(words)
    for word in waiting:
        if word == "--":
            rest += [word, *waiting]
            break
        name = word.lstrip("-").partition("=")[0] if word.startswith("-") else ""
        if name in ("help", "h", "helpshort", "helpfull"):
            wants_help = True
        elif name == "config" or name.startswith("config."):
            text = word.lstrip("-")
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
        given = f"={flag.default}" if flag.default is not None else "=..."
        users = [name for name in modes if flag.name in modes[name].flags.split()]
        whose = f"{', '.join(users)}: " if users else ""
        lines.append(f"  {'--' + flag.name + given:<20}{whose}{flag.help}")
    if config is not None:
        lines += ["", "Configuration (value as it stands):", config_lib.describe(config)]
    return "\n".join(lines)


def _guarded(again: list[str], work: Callable[[], int | None], tell: Callable[[str], None]) -> int:
    """Does the work, and turns every end that is no bug into a line and an exit code."""
    try:
        code = work() or 0
        sys.stdout.flush()
        return code
    except signals.Interrupted as stop:
        command = shlex.join(again)
        tell(f"{stop}; saved. To go on, give the same command again:\n  {command}")
        return stop.exit_code
    except KeyboardInterrupt:
        tell(signals.NOTHING_SAVED)
        return _CTRL_C
    except signals.Diverged as error:
        tell(str(error))
        return _DIVERGED
    except Misuse as error:
        return _misused(error, again)
    except BrokenPipeError:  # `| head` has seen enough
        _drop_output()
        return _PIPE
    except ValueError as error:
        if not _is_ours(error):
            raise
        tell(report.printable(str(error)))
        return _MISTAKE
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        _drop_output()
        tell(report.printable(f"{error.strerror}: {error.filename or 'writing'}"))
        return _MISTAKE


def _misused(error: Exception, again: list[str]) -> int:
    note(f"{error}\n(see: {shlex.join(again[:3])} --help)")
    return _USAGE


def note(text: str) -> None:
    """A remark beside the results, which alone go to standard output."""
    print(report.printable(text), file=sys.stderr, flush=True)


def refuse_words(request: Request) -> None:
    """Raises `Misuse` where a program that takes flags only is given other words."""
    if request.words:
        raise Misuse(f"unexpected words: {' '.join(request.words)} (flags are --name=value)")


def _drop_output() -> None:
    """Drops what standard output has not taken: Python would try, and complain, again on exit."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def _plain_warnings(is_lead: Callable[[], bool]) -> Iterator[None]:
    """This package's warnings are for the user: one line, without a place in the source."""

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
    """A ValueError raised by this package speaks to the user; one from elsewhere is a bug."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith(
        "hsvit_jax"
    )
