#!/usr/bin/env bash
# Set-up, then: a small GPT trained by Megatron on four hosts with slow links, made of this machine, once vanilla and once
# compressed, side by side. Where no hosts can be made, all ranks share the machine, and the gain is planned.
#   scripts/quickstart.sh [--input PATH] [--iterations N] [--output DIR] [...]     (--help shows all)
# Results: results/quickstart/index.html, summary.json, CSV and pictures.
set -euo pipefail
# No cd: paths on the command line are the caller's.
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
# shellcheck source=scripts/find_python.sh
source "$root/scripts/find_python.sh"

"$root/scripts/setup_env.sh"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
# -P: a folder named scripts where the caller stands is not ours. exec: Ctrl-C and signals reach the program itself.
# A later --output wins.
exec "$(find_python "$root")" -P -m scripts.quickstart --output "$(find_workspace "$root")/results/quickstart" "$@"
