"""`optimus-cc completion bash|zsh`: a script that completes our commands, and after `doctor --` our training flags."""

import argparse
import dataclasses

from optimus_cc_ext.config import OptimusConfig, flag_of
from optimus_cc_ext.config.flags import PRESETS

__all__ = ["completion"]

_SCRIPT = """\
_optimus_cc() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} command=${{COMP_WORDS[1]}} words="{commands}" flags="{flags}" before
  case $command in
{cases}
  esac
  [[ ${{COMP_WORDS[COMP_CWORD-1]}} != --optimus-cc ]] || flags="{presets}"
  [[ $command != doctor ]] || for before in "${{COMP_WORDS[@]:2:COMP_CWORD-2}}"; do
    # A launch line: our flags, and files, its script for one.
    [[ $before != -- ]] || {{ COMPREPLY=($(compgen -f -W "$flags" -- "$word")); return; }}
  done
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -F _optimus_cc optimus-cc"""


def completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script for `shell`; zsh takes bash's."""
    [commands] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    cases = "\n".join(f'    {name}) words="{_words(sub)}" ;;' for name, sub in commands.choices.items())
    flags = " ".join(
        ["--optimus-cc", *(flag_of(f.name) for f in dataclasses.fields(OptimusConfig) if f.metadata["help"])]
    )
    script = _SCRIPT.format(commands=_words(parser), cases=cases, flags=flags, presets=" ".join(PRESETS))
    return script if shell == "bash" else f"autoload -U +X bashcompinit && bashcompinit\n{script}"


def _words(parser: argparse.ArgumentParser) -> str:
    words = [word for action in parser._actions for word in (*action.option_strings, *(action.choices or ()))]
    return " ".join(words)
