"""`bsi --completion bash|zsh|fish`: a script that completes commands, their options, and what they are about.

    bash   eval "$(bsi --completion bash)"            in ~/.bashrc
    zsh    eval "$(bsi --completion zsh)"             in ~/.zshrc, after compinit
    fish   bsi --completion fish | source             in ~/.config/fish/config.fish

The script is made from what `--help` shows, once: completing starts no Python.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import sys
import typing
from collections.abc import Mapping, Sequence
from typing import Literal

import tyro

from bsi import cli
from bsi.cli import COMMANDS
from bsi.pretrained import BUNDLED

__all__ = ["SHELLS", "main", "script"]

SHELLS = ("bash", "zsh", "fish")
GENERAL = ("--help", "--version", "--completion")
OPENS_MODELS = ("sample", "eval", "view")  # and so take the name of a bundled one

BASH = """\
_bsi() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" words
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="{commands}"
  else
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
  local IFS=$'\\n'  # a file's name may hold blanks
  [ "$COMP_CWORD" -gt 1 ] && COMPREPLY+=($(compgen -f -- "$cur"))
  return 0
}}
complete -o filenames -o bashdefault -F _bsi bsi
"""


def main(words: Sequence[str]) -> int:
    """Print the script for the shell that is named."""
    if len(words) != 1 or words[0] not in SHELLS:
        print(
            f"bsi --completion: one of {', '.join(SHELLS)} is needed: got {' '.join(words) or 'nothing'}",
            file=sys.stderr,
        )
        return 2
    print(script(words[0]), end="")
    return 0


def script(shell: str) -> str:
    known = {name: words_of(name) for name in COMMANDS}
    if shell == "fish":
        return _fish(known)
    cases = "\n".join(f'      {name}) words="{" ".join(words)}" ;;' for name, words in known.items())
    made = BASH.format(commands=" ".join([*COMMANDS, *GENERAL]), cases=cases)
    # zsh runs it as it is, in its own emulation of bash's completion
    return f"autoload -U +X bashcompinit && bashcompinit\n{made}" if shell == "zsh" else made


def _fish(known: Mapping[str, Sequence[str]]) -> str:
    lines = [f"complete -c bsi -n __fish_use_subcommand -f -a '{' '.join(GENERAL)}'"]
    for name, words in known.items():
        summary = COMMANDS[name].summary.replace("'", "\\'")
        lines.append(f"complete -c bsi -n __fish_use_subcommand -f -a {name} -d '{summary}'")
        lines.append(f"complete -c bsi -n '__fish_seen_subcommand_from {name}' -a '{' '.join(words)}'")
    return "\n".join(lines) + "\n"


def words_of(command: str) -> list[str]:
    """What may follow a command: the names it knows, and its options."""
    if command == "train":
        from bsi.recipes import RECIPES

        # a recipe's fields are its options; those of `digits` are shared by all
        return [*RECIPES, "--list", "--method", "--backbone", *options_of("train", "digits")]
    options = COMMANDS[command].options
    module = importlib.import_module(f"bsi.cli.{COMMANDS[command].module}")
    names = [] if options is None else choices(getattr(module, options))
    return [*names, *(BUNDLED if command in OPENS_MODELS else ()), *options_of(command)]


def options_of(*words: str) -> list[str]:
    """The options that `bsi words... --help` shows, at the beginning of a line."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        cli.main([*words, "--help"])
    shown = re.findall(r"^[ │]*(-.*?)(?:  |$)", out.getvalue(), re.MULTILINE)
    return list(dict.fromkeys(name for line in shown for name in re.findall(r"--[a-z][\w.-]*", line)))


def choices(options: type) -> list[str]:
    """The choices of a command's first word, where they are few."""
    first = next(iter(typing.get_type_hints(options, include_extras=True).values()))
    if tyro.conf.Positional in getattr(first, "__metadata__", ()) and typing.get_origin(first.__origin__) is Literal:
        return [str(choice) for choice in typing.get_args(first.__origin__)]
    return []
