"""`bsi --completion bash|zsh|fish`: a script that completes commands, their options, and what they are about.

    bash   eval "$(bsi --completion bash)"            in ~/.bashrc
    zsh    eval "$(bsi --completion zsh)"             in ~/.zshrc, after compinit
    fish   bsi --completion fish | source             in ~/.config/fish/config.fish

The script is made from the dataclasses of the options, once: completing starts no Python.
"""

from __future__ import annotations

import importlib
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Literal

import tyro

from bsi.cli import COMMANDS
from bsi.pretrained import BUNDLED

__all__ = ["SHELLS", "main", "script"]

SHELLS = ("bash", "zsh", "fish")
GENERAL = ("--help", "--version", "--completion")

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
    """What may follow a command: its options, and the names it knows."""
    module = importlib.import_module(f"bsi.cli.{COMMANDS[command].module}")
    # `train` has the options of its recipe beside those of every run; the latter are the same for all
    options = COMMANDS[command].options or "Options"
    hints = typing.get_type_hints(getattr(module, options), include_extras=True)
    found: list[str] = []
    for field in fields(getattr(module, options)):
        hint = hints[field.name]
        if tyro.conf.Positional in getattr(hint, "__metadata__", ()):
            found += _names(hint.__origin__, field.name)
        else:
            found.append(f"--{'no-' if field.default is True else ''}{field.name.replace('_', '-')}")
    if command == "train":
        from bsi.recipes import RECIPES

        found = [*RECIPES, "--list", "--method", "--backbone", *found]
    return [*found, "--help"]


def _names(hint: object, field: str) -> list[str]:
    if typing.get_origin(hint) is Literal:
        return [str(choice) for choice in typing.get_args(hint)]
    return list(BUNDLED) if field == "run" else []
