"""The command that prints a shell's completion: hsvit completion."""

from collections.abc import Mapping

from hsvit_jax import cli
from hsvit_jax import config as config_lib
from hsvit_jax.cli import Command, Request

# Bash splits words at '='; zsh does not, and needs them whole.
_SCRIPT = """\
_hsvit() {
  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} flag= start= words=
  if [[ -n $ZSH_VERSION && $word == *=* ]]; then
    flag=${word%%=*} start=${word%%=*}= word=${word#*=}
  elif [[ $word == = ]]; then flag=$before word=
  elif [[ $before == = ]]; then flag=${COMP_WORDS[COMP_CWORD-2]}
  fi
  case "$COMP_CWORD ${COMP_WORDS[1]} $flag" in
CASES
  esac
  COMPREPLY=($(compgen -P "$start" -W "$words" -- "$word"))
  [[ ${COMPREPLY[0]} == *= && -z $ZSH_VERSION ]] && compopt -o nospace
}
complete -o default -F _hsvit hsvit"""


def of(commands: Mapping[str, Command]) -> Command:
    """Returns the command, which completes these commands, their flags, keys and the values."""

    @Command(
        "Prints the completion of this program for a shell.",
        '$ bash  # in ~/.bashrc: eval "$(hsvit completion bash)"',
        words="bash|zsh",
    )
    def completion(request: Request) -> None:
        """Prints the script."""
        from hsvit_jax.config import schema

        if request.words[0] not in ("bash", "zsh"):
            raise cli.Misuse(f"no completion for {request.words[0]}: name bash or zsh")
        cases = {"1 *": commands}
        cases |= {f'*" --config.{key}"': x.choices for key, x in schema.KEYS.items() if x.choices}
        for name, command in commands.items():
            flags = cli.make_flags(command.flags)
            values = {flag: getattr(flags[flag].parser, "enum_values", ()) for flag in flags}
            cases |= {f'*" {name} --{flag}"': x for flag, x in values.items() if x}
            keys = [f"config.{key}" for key in config_lib.all_keys() if command.reads_key(key)]
            named = [*values, *["config"] * bool(command.config), *keys]
            cases[f'*" {name} "'] = [*(f"--{word}=" for word in named), "--help"]
        lines = [f'    {case}) words="{" ".join(map(str, x))}" ;;' for case, x in cases.items()]
        lines[0] = lines[0].replace("1 *", "1\\ *")
        zsh = "autoload -U +X bashcompinit && bashcompinit\n" * (request.words[0] == "zsh")
        print(zsh + _SCRIPT.replace("CASES", "\n".join(lines)))

    return completion
