"""The command line: argv to a request, mistakes and signals to exit codes; it knows no command.

Exit codes: 0 done, 1 a mistake in the request or its data, 2 in the command line, 3 training
diverged, 42 saved after SIGTERM or SIGHUP, 75 stalled (see `runtime.watchdog`), 130 stopped by
Ctrl-C, 141 the reader of a pipe is gone.
"""

import contextlib
import errno
import functools
import importlib
import math
import os
import re
import shlex
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import ml_collections
from absl import flags

from hsvit_jax import config as config_lib
from hsvit_jax import storage
from hsvit_jax.runtime import compile_cache, signals
from hsvit_jax.text import few, nearest, note, printable

_MISTAKE, _USAGE, _DIVERGED, _CTRL_C, _PIPE = 1, 2, 3, 130, 141
_EXAMPLE = "c4a8"  # whose keys --help shows, without --config
_HELP = ("help", "h", "helpshort", "helpfull")

# Errors of the machine or a path rather than of the program: one line says it all.
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
_REFUSED += (errno.ENAMETOOLONG, errno.ELOOP, errno.EFBIG)

#: For `Command.config`: every key of the configuration is read.
EVERYTHING = "*"

#: Keys of the devices that a trained network runs on, whatever the configuration of its training.
MESH = "mesh.group mesh.data mesh.aggregate"


class Misuse(ValueError):
    """An invalid command line: exit code 2."""


@contextlib.contextmanager
def misuse() -> Iterator[None]:
    """Turns a mistake that reading words has found into Misuse."""
    try:
        yield
    except ValueError as error:
        raise Misuse(str(error)) from error


def ending(out: str | Path, suffix: str = ".png", word: str = "--out") -> Path:
    """Returns the path of a file to write. Raises Misuse for another ending than `suffix`.

    Args:
      word: of the command line that names the file.
    """
    if not str(out).endswith(suffix):
        raise Misuse(f"{word} must end in {suffix}; got {out}")
    return Path(out)


class Numbers(flags.ArgumentParser):
    """A flag of numbers: 0.5, 2,2 or 32x48."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def parse(self, argument: str) -> tuple:
        try:
            return tuple(self.kind(word) for word in re.split("[,x×]", argument))
        except ValueError:
            raise ValueError("expected numbers such as 0.5, 2,2 or 32x48") from None


class _Place(flags.ArgumentParser):
    """A flag of a file, a folder or a URL; of `--out=~/x` a shell hands on the ~."""

    def parse(self, argument: str) -> str:
        return os.path.expanduser(argument)


class _Path(_Place):
    """A flag of a file or folder of this machine."""

    def parse(self, argument: str) -> str:
        if storage.is_url(argument):
            raise ValueError("expected a path of this machine, not a URL")
        return super().parse(argument)


define_place = functools.partial(flags.DEFINE, _Place())
define_path = functools.partial(flags.DEFINE, _Path())


@dataclass(frozen=True)
class Command:
    """One row of the table of commands: the work and its input. All other input is refused.

    Attributes:
      purpose: a sentence, for the list of commands.
      module: its name, of which `run(request)` returns the exit code, None for 0.
      examples: lines of --help, '$' in place of the program and this command's name.
      flags: a row for each: `flags.DEFINE_...` of absl and its arguments.
      config: sections and keys of the configuration, separated by blanks. A command with the flag
        `checkpoint` may be given a configuration in its place, which then names the run.
      needs_config: whether --config is required.
      words: names of the words that are no flags, such as 'FILE [OUT]'; empty where there are none.
        A command with the flag `checkpoint` takes RUN before them, unless a flag names the run.
        A name is a word, one in brackets may be left out, and '...' stands for more.
      exclusive: flags and keys that exclude each other, separated by blanks.
      remember: keep compiled programs for the next start.
    """

    purpose: str
    module: str
    examples: str
    flags: tuple[tuple, ...] = ()
    config: str = ""
    needs_config: bool = False
    words: str = ""
    exclusive: tuple[str, ...] = ()
    remember: bool = True

    @property
    def takes_run(self) -> bool:
        """Says whether the command reads a run."""
        return any("checkpoint" in row for row in self.flags)

    @property
    def usage(self) -> str:
        """Names the words that the command takes."""
        return " ".join(filter(None, ["RUN" * self.takes_run, self.words]))

    def reads_key(self, key: str) -> bool:
        """Says whether the command reads a configuration key, such as 'train.batch'."""
        return not {EVERYTHING, key, key.partition(".")[0]}.isdisjoint(self.config.split())


@dataclass(frozen=True)
class Request:
    """A parsed command line.

    Attributes:
      program: 'hsvit', or how it is started from Python.
      settings: its KEY=VALUE overrides.
      config: the configuration of both; None without --config.
      words: all that is no flag, such as names of files.
      run: the one named by place or a flag; '' where the configuration alone names it.
    """

    program: str
    name: str
    argv: list[str]
    flags: flags.FlagValues
    spec: str = ""
    settings: list[str] = field(default_factory=list)
    config: ml_collections.ConfigDict | None = None
    words: list[str] = field(default_factory=list)
    run: str = ""

    @property
    def line(self) -> str:
        """Returns the whole command line, to be given again."""
        return f"{self.program} {shlex.join([self.name, *self.argv])}"

    def train_line(self, **changes: str) -> str:
        """Returns the command that trains this configuration with `changes`, by key."""
        kept = [s for s in self.settings if s.partition("=")[0] not in changes]
        words = [*kept, *(f"{key}={value}" for key, value in changes.items())]
        config = [f"--config={self.spec}", *(f"--config.{word}" for word in words)]
        return f"{self.program} {shlex.join(['train', *config])}"

    @property
    def source(self) -> str:
        """Returns the run, which the configuration may name."""
        return self.run or self.workdir

    @property
    def workdir(self) -> str:
        """Returns the folder given, or the configuration's default."""
        settings = self.config, self.spec, self.settings
        return self.flags.workdir or config_lib.default_workdir(*settings)


def run(argv: list[str] | None, commands: Mapping[str, Command], about: str, name: str = "") -> int:
    """Parses the command line, does the work, and returns the exit code.

    A user's mistake that a command raises becomes one line on standard error; a bug keeps its
    traceback.

    Args:
      argv: the command line, the program's name first; None for that of this process.
      about: lines on --config, for --help.
      name: of the command, where the command line does not begin with one.
    """
    program, *words = sys.argv if argv is None else argv
    program = "hsvit" if Path(program).stem == "hsvit" else "python -m hsvit_jax"
    asks = words[0].lstrip("-") if len(words) == 1 and words[0].startswith("-") else ""
    if not name and (not words or asks in ("version", *_HELP)):
        version = f"hsvit_jax {metadata.version('hsvit_jax')}"
        text = version if asks == "version" else _list(program, commands, about)
        with _exit_code(program, note) as end:
            print(text)
        return end.code or (0 if words else _USAGE)
    if not name:
        name, words = _name_of(words, commands)
    if name not in commands:
        near = config_lib.meant(name, commands)
        near = f" Did you mean {near[0]}?" if near else nearest(name, commands)
        return _misused(f"unknown command {name!r}.{near}", program)
    command, start = commands[name], f"{program} {name}"
    if argv is None and command.remember:
        compile_cache.remember_compilations()  # before jax is imported
    request = Request(program, name, words, make_flags(command.flags))
    try:
        spec, settings, rest, help_word = _split_config(words)
        found = request.flags([name, *rest])[1:]
        request = replace(request, spec=spec or "", settings=settings, words=found)
        if help_word:
            every = help_word == "helpfull" or command.config != EVERYTHING
            text = _help(start, command, about, request, every)
            with _exit_code(start, note) as end:
                print(text)
            return end.code
        if spec is not None:
            request = replace(request, config=config_lib.get_config(spec, *settings))
        request = _with_run(request, command) if command.takes_run else request
        refuse_unused(request, command)
        work = importlib.import_module(command.module).run
    except flags.UnrecognizedFlagError as error:
        return _misused(_users_of(error, name, commands), start)
    except (flags.Error, ValueError) as error:
        return _misused(str(error), start)
    # Late: it imports jax, which the list of commands and mistakes in flags need not wait for.
    from hsvit_jax.runtime import coordination

    signals.raise_on_ctrl_c()
    with _plain_warnings(coordination.is_lead):
        with _exit_code(start, coordination.print_once, request.line) as end:
            end.code = work(request) or 0
        return coordination.leave(end.code, end.alone)


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


def _name_of(words: list[str], commands: Mapping[str, Command]) -> tuple[str, list[str]]:
    """(the command, all other words): the first word, else --mode=NAME, else 'train'."""
    end = words.index("--") if "--" in words else len(words)
    for i, word in enumerate(words[:end] if words[0] not in commands else []):
        flag, equals, name = word.partition("=")
        if flag in ("--mode", "-mode"):
            after = i + 1 if equals else i + 2
            return name or "".join(words[i + 1 : after]), [*words[:i], *words[after:]]
    return ("train", words) if words[0].startswith("-") else (words[0], words[1:])


def _users_of(
    error: flags.UnrecognizedFlagError, name: str, commands: Mapping[str, Command]
) -> str:
    """The message for a flag that a command has not: what was meant, or which commands have it."""
    own = [f"--{flag}" for flag in make_flags(commands[name].flags)]
    if near := meant(error.flagname, commands[name], own, error.flagvalue.partition("=")[2]):
        return f"{name} has no --{error.flagname}; did you mean {near}?"
    for flag in (error.flagname, error.flagname.removeprefix("no")):
        if users := [other for other in commands if flag in make_flags(commands[other].flags)]:
            of = few(users)
            return f"{name} does not use --{flag}, which is for {of}: leave it out"
    return str(error)


def meant(word: str, command: Command, own: Sequence[str], value: str = "") -> str:
    """Says what a word of another program is here: flags, keys with their `value`, or advice."""
    keys = [key for key in config_lib.all_keys() if command.reads_key(key)]
    found = config_lib.meant(word, [*keys, *own])
    if not command.reads_key("data.name"):
        found = [x for x in found if not x.startswith("--config")]
    found = [f"--config.{x}={value or '...'}" if x in keys else x for x in found]
    return " or ".join(f"{x}={value}" if x in own and value else x for x in found)


def _with_run(request: Request, command: Command) -> Request:
    """The request with its run, which is the first word where nothing else names it."""
    words, named = request.words, request.flags.checkpoint or request.flags.workdir
    if words and not named:
        # A configuration finds its run, or has other data or the network of the one that is named.
        alone = request.config is None or not command.words
        saved = words[0].startswith("zoo:") or (Path(words[0]) / "checkpoints").is_dir()
        saved = saved or storage.is_url(words[0])
        if alone or saved or (words[0].endswith(".safetensors") and Path(words[0]).is_file()):
            named, *words = words
    return replace(request, run=named or "", words=words)


def refuse_unused(request: Request, command: Command) -> None:
    """Raises `Misuse` for input that the command does not read, and for what it lacks.

    Overrides that name a run are read where the run is found by its configuration.
    """
    values, name = request.flags.flag_values_dict(), request.name
    for flag, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise Misuse(f"flag --{flag}={value}: expected a finite number")
    names, words = command.words.split(), request.words
    if len(words) > len(names) and "..." not in names:
        surplus = words[len(names) :]
        own, pairs = [f"--{x}" for x in values], (word.partition("=") for word in surplus)
        near = [meant(key, command, own, value) for key, equals, value in pairs if equals]
        near = " ".join(filter(None, near))
        hint = f"; did you mean {near}?" if near else " (flags are --name=value)"
        raise Misuse(f"unexpected words: {' '.join(surplus)}{hint}")
    keys = [setting.partition("=")[0] for setting in request.settings]
    given = {flag: f"--{flag}" for flag, value in values.items() if value not in (None, False, "")}
    given |= {key: f"--config.{key}" for key in keys}
    for row in (*command.exclusive, *["checkpoint workdir"] * command.takes_run):
        first, *others = row.split()
        for other in others:
            if first in given and other in given:
                both = f"{given[first]} and {given[other]}"
                raise Misuse(f"{both} exclude each other: leave one out")
    _check_config(request, command, keys)
    least = len({name for name in names if name[0] not in "[."})
    if len(words) < least or (command.takes_run and not (request.run or request.config)):
        example = command.examples.partition("\n")[0].replace("$", f"{request.program} {name}")
        raise Misuse(f"{name} needs {command.usage}, as in {example}")


def _check_config(request: Request, command: Command, keys: list[str]) -> None:
    """Raises Misuse for keys that the command does not read, and a missing configuration."""
    name, named, finds_run = request.name, request.run, command.takes_run
    more = set(command.config.split()) - set(MESH.split())
    by_words = command.config == EVERYTHING and command.words  # which name configurations
    if request.config is None and command.needs_config:
        raise Misuse(f"{name} needs --config=FILE")
    unread = request.config is not None and (by_words or not more)
    # But for the one that names the run, or the file of its network.
    if unread and not (finds_run and (not named or config_lib.is_registered(request.config))):
        beside = f" beside {named}" if named else ""
        instead = f"it takes {command.words}" if by_words else "leave it out"
        raise Misuse(f"{name} does not use --config{beside}: {instead}")
    for key in keys:
        by_config = finds_run and not named and config_lib.names_run(key)
        if not (command.reads_key(key) or by_config):
            read = few(command.config.split())
            raise Misuse(
                f"{name} does not use --config.{key}: leave it out (keys that it reads: {read})"
            )
        if request.config is None and not (by_words or (named and key.startswith("mesh."))):
            raise Misuse(f"--config.{key} needs --config=FILE")


def _split_config(words: list[str]) -> tuple[str | None, list[str], list[str], str]:
    """(--config, its overrides as KEY=VALUE, all other words, the one that asks for help)."""
    spec, settings, rest, help_word = None, [], [], ""
    waiting = iter(words)
    for word in waiting:
        if word == "--":
            rest += [word, *waiting]
            break
        text = word.lstrip("-") if word.startswith("-") else ""
        name = text.partition("=")[0]
        if name in _HELP:
            help_word = name
        elif name == "config" or name.startswith("config."):
            if "=" not in text:
                text += "=" + next(waiting, "")
            if name == "config":
                spec = text.removeprefix("config=")
            else:
                settings.append(text.removeprefix("config."))
        else:
            rest.append(word)
    return spec, settings, rest, help_word


def _list(program: str, commands: Mapping[str, Command], about: str) -> str:
    width = max(map(len, commands))
    lines = [f"  {name:<{width}}  {command.purpose}" for name, command in commands.items()]
    usage = f"usage: {program} COMMAND [--FLAG=VALUE ...] [--config.KEY=VALUE ...]"
    more = f"Flags and keys of a command: {program} COMMAND --help    Version: {program} --version"
    return "\n".join([usage, "", *lines, "", about, more])


def _help(start: str, command: Command, about: str, request: Request, every: bool) -> str:
    """A command's sentence, examples and flags, and the keys of the configuration that it reads.

    Args:
      every: key, not only those that people change first.
    """
    config = ("--config=FILE", "[--config.KEY=VALUE ...]") if command.config else ()
    parts = (*config[: command.needs_config], command.usage, "[--FLAG=VALUE ...]", *config[1:])
    lines = [f"usage: {start} {' '.join(filter(None, parts))}", "", command.purpose, ""]
    lines += [re.sub(r"(?m)^", "  ", command.examples.replace("$", start)), "", "Flags:"]
    for flag in map(request.flags.__getitem__, request.flags):
        default = "..." if flag.default is None else flag.default_as_str.strip("'")
        lines.append(f"  {f'--{flag.name}={default}':<19} {flag.help}")
    if command.config:
        whose = "" if request.spec else f" of --config={_EXAMPLE}; beside another --config, its own"
        keys = config_lib.get_config(request.spec or _EXAMPLE, *request.settings)
        lines += ["", about, "", f"Keys that it reads, and their values{whose}:"]
        shown = command.reads_key if every else config_lib.FIRST.__contains__
        lines += [config_lib.describe(keys, shown)]
        lines += [] if every else ["", f"All keys: {start} --helpfull"]
    return "\n".join(lines)


class _End:
    """How the work ended."""

    code = 0
    alone = False  # whether this process of the job alone came to it


@contextlib.contextmanager
def _exit_code(start: str, print_line: Callable[[str], None], line: str = "") -> Iterator[_End]:
    """Maps every end of the work that is no bug to a line and an exit code.

    Args:
      start: program and command, for hints.
      line: the whole command line.
    """
    end = _End()
    try:
        yield end
        sys.stdout.flush()
    except signals.Interrupted as stop:
        kept = "saved" if stop.step else "there was nothing left to save"
        print_line(f"{stop}; {kept}. To go on, give the same command again:\n  {line}")
        end.code, end.alone = stop.exit_code, not stop.step
    except KeyboardInterrupt:
        print_line(signals.NOTHING_SAVED)
        end.code = _CTRL_C
    except signals.Diverged as error:
        print_line(str(error))
        end.code = _DIVERGED
    except Misuse as error:
        end.code = _misused(str(error), start)
    except BrokenPipeError:  # `| head` has seen enough
        _drop_output()
        end.code = _PIPE
    except ValueError as error:
        if not _is_ours(error):
            raise
        print_line(printable(str(error)))
        end.code = _MISTAKE
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        _drop_output()
        print_line(printable(f"{error.strerror}: {error.filename or 'writing'}"))
        end.code = _MISTAKE


def _misused(message: str, start: str) -> int:
    note(f"{message}\n(see: {start} --help)")
    return _USAGE


def _drop_output() -> None:
    """Drops buffered output that cannot be written, before Python tries again on exit."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def _plain_warnings(is_lead: Callable[[], bool]) -> Iterator[None]:
    """Prints this package's warnings in one line, without a place in the source."""

    def show(
        message: Warning | str, category: type[Warning], filename: str, *rest: Any, **more: Any
    ) -> None:
        if category.__module__.startswith("hsvit_jax") or "hsvit_jax" in Path(filename).parts:
            if is_lead() and str(message) not in said:  # which `warnings` forgets
                said.add(str(message))
                note(f"warning: {message}")
        elif not compile_cache.forget(str(message)):
            before(message, category, filename, *rest, **more)

    before, said = warnings.showwarning, set()
    with warnings.catch_warnings():  # which restores it
        warnings.showwarning = show
        yield


def _is_ours(error: ValueError) -> bool:
    """Whether this package raised the error, for the user to read; one from elsewhere is a bug."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__", "").startswith("hsvit_jax")
