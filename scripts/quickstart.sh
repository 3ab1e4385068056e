#!/usr/bin/env bash
# Sets .venv up, then trains a small GPT by Megatron on four hosts with slow links, made of this machine, once vanilla
# and once compressed, side by side. If no hosts can be made, all ranks share the machine, and the gain is planned.
#   scripts/quickstart.sh [--input PATH] [--iterations N] [--output DIR] [...]     (--help shows all)
# Results: results/quickstart/index.html, summary.json, CSV and pictures.
set -euo pipefail
# The script stays in the current folder, because paths on the command line are the caller's.
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
# shellcheck source=scripts/find_python.sh
source "$root/scripts/find_python.sh"

"$root/scripts/setup_env.sh"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
# With -P Python ignores a folder named scripts in the current folder. With exec signals reach the program itself. The
# last --output counts.
python="$(find_python "$root")"
exec "$python" -P -m scripts.quickstart --output "$(find_workspace "$root")/results/quickstart" "$@"
