#!/usr/bin/env bash
# Makes docs/api.md from the docstrings of the names that other programs call: scripts/api_reference.sh
#
# Needs griffe2md: pip install 'griffe2md>=1.5'. Run it after a change of a public name, argument or docstring.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

{
  echo "# Python API"
  echo
  echo "Made by \`scripts/api_reference.sh\` from the docstrings. The first group is there as \`optimus_cc_ext.NAME\`, too."
  echo "The fields of \`OptimusConfig\` are the flags of [flags.md](flags.md), with underscores."
  for module in api hooks.handle.Handle hooks.steps.Step bridge errors; do
    echo
    # Types get no links, because most of them are Python's; the lists of functions would repeat each first sentence.
    PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" griffe2md "optimus_cc_ext.$module" |
      sed -E '/^- \[\*\*/d; /^\*\*(Functions|Classes|Attributes):\*\*$/d; s/\[([^]*]+)\]\(#[^)]*\)/\1/g; s#</?code>#`#g; s/[[:space:]]+$//'
  done
} | cat -s >docs/api.md.partial
mv docs/api.md.partial docs/api.md
