"""The command line: argv to a request, mistakes and signals to exit codes; it knows no command.

Exit codes: 0 done, 1 a mistake in the request or its data, 2 in the command line, 3 training
diverged, 42 saved after SIGTERM or SIGHUP, 75 stalled (see `runtime.watchdog`), 130 stopped by
Ctrl-C, 141 the reader of a pipe is gone.
"""

import contextlib
import functools
import itertools
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
_EXAMPLE = "c4a8"  # --help lists its keys, without --config
_HELP = ("help", "h", "helpshort", "helpfull")

#: For `Command.config`: every key of the configuration is read.
EVERYTHING = "*"

#: Keys of the devices that a trained network runs on.
MESH = "mesh.group mesh.data mesh.aggregate"


class Misuse(ValueError):
    """An invalid command line: exit code 2."""


@contextlib.contextmanager
def misuse() -> Iterator[None]:
    """Turns ValueError into Misuse."""
    try:
        yield
    except ValueError as error:
        raise Misuse(str(error)) from error


def ending(out: str | Path, suffix: str = ".png", word: str = "--out") -> Path:
    """Returns the path of a file to write. Raises Misuse, naming `word`, for another suffix."""
    if not str(out).endswith(suffix):
        raise Misuse(f"{word} must end in {suffix}; got {out}")
    return Path(out)


def _numbers(argument: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, re.split("[,x×]", argument)))
    except ValueError:
        raise ValueError("expected numbers such as 0.5, 2,2 or 32x48") from None


class _Parser(flags.ArgumentParser):
    """A flag's parser, from a function of its text."""

    def __init__(self, parse: Callable[[str], Any]) -> None:
        self.parse = parse


def _local_path(argument: str) -> str:
    if storage.is_url(argument):
        raise ValueError("expected a path of this machine, not a URL")
    return os.path.expanduser(argument)  # for `--out=~/x`


define_numbers = functools.partial(flags.DEFINE, _Parser(_numbers))
define_path = functools.partial(flags.DEFINE, _Parser(_local_path))
#: A folder, a file or a URL.
define_place = functools.partial(flags.DEFINE, _Parser(os.path.expanduser))


@dataclass(frozen=True)
class Command:
    """One row of the table of commands: the work and its input. All other input is refused.

    Attributes:
      purpose: one sentence for the list of commands.
      examples: lines of --help; '$' stands for the program and this command's name.
      flags: a row for each flag: absl's `flags.DEFINE_...` and its arguments.
      config: sections and keys of the configuration that the command reads. Beside the flag
        `checkpoint`, a configuration may name the run.
      needs_config: whether --config is required.
      words: names of the words that are no flags, as 'FILE [OUT]'; [] is optional and ... is more.
        With the flag `checkpoint`, RUN comes first unless a flag names the run.
      exclusive: flags and keys that exclude each other, the first all others.
      remember: whether to keep compiled programs for the next start.
      group: heading in the list of commands.
      single: maps the configuration's overrides to those of one configuration.
      work: does the work of a `Request` and returns the exit code, None for 0.
    """

    purpose: str
    examples: str
    flags: tuple[tuple, ...] = ()
    config: str = ""
    needs_config: bool = False
    words: str = ""
    exclusive: tuple[str, ...] = ()
    remember: bool = True
    group: str = ""
    single: Callable[[list[str]], list[str]] = list
    work: Callable[..., int | None] = lambda request: None

    def __call__(self, work: Callable[..., int | None]) -> "Command":
        """Returns the row with its work, as a decorator."""
        return replace(self, work=work)

    @property
    def takes_run(self) -> bool:
        """Whether the command reads a run."""
        return any("checkpoint" in row for row in self.flags)

    @property
    def usage(self) -> str:
        """The words that the command takes."""
        return " ".join(filter(None, ["RUN" * self.takes_run, self.words]))

    def reads_key(self, key: str) -> bool:
        """Returns whether the command reads a configuration key, such as 'train.batch'."""
        return not {EVERYTHING, key, key.partition(".")[0]}.isdisjoint(self.config.split())


@dataclass(frozen=True)
class Request:
    """A parsed command line.

    Attributes:
      program: 'hsvit', or the command that starts it from Python.
      spec, settings: the value of --config and its KEY=VALUE overrides.
      config: their configuration; None without --config.
      words: all words that are no flags, such as file names.
      run: the run that a word or a flag names; '' if only the configuration names it.
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
        """The whole command line, to paste."""
        return f"{self.program} {shlex.join([self.name, *self.argv])}"

    def train_line(self, **changes: Any) -> str:
        """Returns the command that trains this configuration with `changes`, by key."""
        return f"{self.program} {shlex.join(['train', *self._config_with(changes)])}"

    def line_with(self, changes: Mapping[str, Any]) -> str:
        """Returns the whole command line with other values, by key."""
        _, _, rest, _ = _split_config(self.argv)
        return f"{self.program} {shlex.join([self.name, *self._config_with(changes), *rest])}"

    def _config_with(self, changes: Mapping[str, Any]) -> list[str]:
        kept = [s for s in self.settings if s.partition("=")[0] not in changes]
        words = [*kept, *(f"{k}={config_lib.shown(v)}" for k, v in changes.items())]
        return [f"--config={self.spec}", *(f"--config.{word}" for word in words)]

    @property
    def source(self) -> str:
        """The run, which the configuration may name."""
        return self.run or self.workdir

    @property
    def workdir(self) -> str:
        """The folder of --workdir, or the configuration's default."""
        settings = self.config, self.spec, self.settings
        return self.flags.workdir or config_lib.default_workdir(*settings)


def run(argv: list[str] | None, commands: Mapping[str, Command], about: str, name: str = "") -> int:
    """Parses the command line, does the work, and returns the exit code.

    A user's mistake becomes one line on standard error; a bug keeps its traceback.

    Args:
      argv: the command line with the program's name; None for that of this process.
      about: lines on --config, for --help.
      name: the command, if the command line does not begin with one.
    """
    program, *words = sys.argv if argv is None else argv
    program = "hsvit" if Path(program).stem == "hsvit" else "python -m hsvit_jax"
    asks = words[0].lstrip("-") if len(words) == 1 and words[0].startswith("-") else ""
    if not name and (not words or asks in ("version", *_HELP)):
        version = f"hsvit_jax {metadata.version('hsvit_jax')}"
        text = version if asks == "version" else _list(program, commands, about)
        return _print(text, program) or (0 if words else _USAGE)
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
            return _print(_help(start, command, about, request, every), start)
        if spec is not None:
            request = replace(
                request, config=config_lib.get_config(spec, *command.single(settings))
            )
        request = _with_run(request, command) if command.takes_run else request
        refuse_unused(request, command)
    except flags.UnrecognizedFlagError as error:
        return _misused(_users_of(error, name, commands), start)
    except (flags.Error, ValueError) as error:
        return _misused(str(error), start)
    # Late: it imports jax, and mistakes in flags need not wait for that.
    from hsvit_jax.runtime import coordination

    signals.raise_on_ctrl_c()
    with _plain_warnings(coordination.is_lead):
        with _exit_code(start, coordination.print_once, request) as end:
            end.code = command.work(request) or 0
        return coordination.leave(end.code, end.alone)


def _print(text: str, start: str) -> int:
    """Prints a text and returns the exit code."""
    with _exit_code(start, note) as end:
        print(text)
    return end.code


def make_flags(table: Iterable[tuple]) -> flags.FlagValues:
    """Defines flags in a new set, apart from those of a notebook.

    Args:
      table: a row for each flag: absl's `flags.DEFINE_...` and its arguments.
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
    """The message for an unknown flag: what was meant, or the commands that have it."""
    own = [f"--{flag}" for flag in make_flags(commands[name].flags)]
    if near := meant(error.flagname, commands[name], own, error.flagvalue.partition("=")[2]):
        return f"{name} has no --{error.flagname}; did you mean {near}?"
    for flag in (error.flagname, error.flagname.removeprefix("no")):
        if users := [other for other in commands if flag in make_flags(commands[other].flags)]:
            return f"{name} does not use --{flag} (a flag of {few(users)}): remove it"
    return str(error)


def meant(word: str, command: Command, own: Sequence[str], value: str = "") -> str:
    """Translates another program's word: flags, keys with their `value`, or advice."""
    keys = [key for key in config_lib.all_keys() if command.reads_key(key)]
    found = config_lib.meant(word, [*keys, *own])
    if not command.reads_key("data.name"):
        found = [x for x in found if not x.startswith("--config")]
    found = [f"--config.{x}={value or '...'}" if x in keys else x for x in found]
    return " or ".join(f"{x}={value}" if x in own and value else x for x in found)


def _with_run(request: Request, command: Command) -> Request:
    """The request with its run: the first word, unless a flag or a configuration names it."""
    words, named = request.words, request.flags.checkpoint or request.flags.workdir
    if words and not named:
        # Beside a configuration, only a saved network is a run; it may also be an image.
        alone = request.config is None or not command.words
        saved = words[0].startswith("zoo:") or (Path(words[0]) / "checkpoints").is_dir()
        saved = saved or storage.is_url(words[0])
        if alone or saved or (words[0].endswith(".safetensors") and Path(words[0]).is_file()):
            named, *words = words
    return replace(request, run=named or "", words=words)


def refuse_unused(request: Request, command: Command) -> None:
    """Raises Misuse for input that the command does not read, and for missing input."""
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
        if first in given and (both := [given[other] for other in others if other in given]):
            raise Misuse(f"{given[first]} and {both[0]} exclude each other: remove one")
    _check_config(request, command, keys)
    least = len({name for name in names if name[0] not in "[."})
    if len(words) < least or (command.takes_run and not (request.run or request.config)):
        example = command.examples.partition("\n")[0].replace("$", f"{request.program} {name}")
        raise Misuse(f"{name} needs {command.usage}, as in {example}")


def _check_config(request: Request, command: Command, keys: list[str]) -> None:
    """Raises Misuse for keys that the command does not read, and a missing configuration."""
    name, named, config = request.name, request.run, request.config
    by_words = command.config == EVERYTHING and command.words  # its words are configurations
    unread = by_words or set(command.config.split()) <= set(MESH.split())
    if config is None and command.needs_config:
        raise Misuse(f"{name} needs --config=FILE")
    # A configuration may name the run, or the file of its network.
    allowed = command.takes_run and (not named or (config and config_lib.is_registered(config)))
    if config is not None and unread and not allowed:
        instead = f"pass {command.words}" if by_words else "remove it"
        raise Misuse(f"{name} does not use --config{f' beside {named}' * bool(named)}: {instead}")
    for key in keys:
        by_config = command.takes_run and not named and config_lib.names_run(key)
        if not (command.reads_key(key) or by_config):
            read = few(command.config.split())
            raise Misuse(f"{name} does not use --config.{key}: remove it (keys it reads: {read})")
        if config is None and not (by_words or (named and key.startswith("mesh."))):
            raise Misuse(f"--config.{key} needs --config=FILE")


def _split_config(words: list[str]) -> tuple[str | None, list[str], list[str], str]:
    """(--config, its overrides as KEY=VALUE, all other words, the word for help)."""
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
    lines = []
    for group, rows in itertools.groupby(commands.items(), lambda row: row[1].group):
        lines += [f"{group}:", *(f"  {name:<{width}}  {row.purpose}" for name, row in rows)]
    usage = f"usage: {program} COMMAND [--FLAG=VALUE ...] [--config.KEY=VALUE ...]"
    more = f"Flags and keys of a command: {program} COMMAND --help    Version: {program} --version"
    return "\n".join([usage, "", *lines, "", about, more])


def _help(start: str, command: Command, about: str, request: Request, every: bool) -> str:
    """A command's purpose, examples and flags, and its keys: `every` one or the first twenty."""
    config = ("--config=FILE", "[--config.KEY=VALUE ...]") if command.config else ()
    parts = (*config[: command.needs_config], command.usage, "[--FLAG=VALUE ...]", *config[1:])
    lines = [f"usage: {start} {' '.join(filter(None, parts))}", "", command.purpose, ""]
    lines += [re.sub(r"(?m)^", "  ", command.examples.replace("$", start)), "", "Flags:"]
    for flag in map(request.flags.__getitem__, request.flags):
        default = "..." if flag.default is None else flag.default_as_str.strip("'")
        lines.append(f"  {f'--{flag.name}={default}':<19} {flag.help}")
    if command.config:
        whose = "" if request.spec else f" with --config={_EXAMPLE}"
        keys = config_lib.get_config(request.spec or _EXAMPLE, *command.single(request.settings))
        lines += ["", about, "", f"Keys that it reads, and their values{whose}:"]
        shown = command.reads_key if every else config_lib.FIRST.__contains__
        lines += [config_lib.describe(keys, shown)]
        lines += [] if every else ["", f"All keys: {start} --helpfull"]
    return "\n".join(lines)


class _End:
    """How the work ended."""

    code = 0
    alone = False  # whether only this process of the job ended


@contextlib.contextmanager
def _exit_code(
    start: str, print_line: Callable[[str], None], request: Request | None = None
) -> Iterator[_End]:
    """Maps expected exceptions to one line and an exit code.

    Args:
      start: program and command, for hints.
      request: the parsed command line.
    """
    end = _End()
    try:
        yield end
        sys.stdout.flush()
    except signals.Interrupted as stop:
        kept = "saved" if stop.step else "there was nothing left to save"
        print_line(f"{stop}; {kept}. To go on, give the same command again:\n  {request.line}")
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
    except (ValueError, OSError, ImportError) as error:
        if not (text := _mistake(error)):
            raise
        if isinstance(error, OSError):
            _drop_output()
        if isinstance(error, config_lib.Contradiction) and error.settings and request.spec:
            fits = request.line_with(error.settings)
            text = f"{error.problems}. This command fits:\n  {fits}"
        print_line(printable(text))
        end.code = _MISTAKE


def _mistake(error: Exception) -> str:
    """The line for a user's mistake; '' for a bug: a ValueError or an import of another package."""
    if isinstance(error, OSError):
        return f"{error.strerror}: {error.filename or 'writing'}" if error.strerror else str(error)
    if isinstance(error, ImportError):
        package = (error.name or "-").partition(".")[0]
        pattern = re.compile(rf"{package.replace('_', '[-_]')}\b.*extra == .(?!test)(\w+)")
        extra = next(filter(None, map(pattern.match, metadata.requires("hsvit_jax") or ())), None)
        return f"{package} is not installed: pip install 'hsvit_jax[{extra[1]}]'" if extra else ""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    ours = frames and frames[-1].f_globals.get("__name__", "").startswith("hsvit_jax")
    return str(error) if ours else ""


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
    """Prints this package's warnings in one line, each once."""

    def show(
        message: Warning | str, category: type[Warning], filename: str, *rest: Any, **more: Any
    ) -> None:
        if category.__module__.startswith("hsvit_jax") or "hsvit_jax" in Path(filename).parts:
            if is_lead() and str(message) not in shown:
                shown.add(str(message))
                note(f"warning: {message}")
        elif not compile_cache.forget(str(message)):
            before(message, category, filename, *rest, **more)

    before, shown = warnings.showwarning, set()
    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
