#!/usr/bin/env bash
# Perplexity of a text, by a converted model.
#   scripts/eval/perplexity.sh --model DIR --text FILE [--sequence-length N] [...]      (--help shows all)
set -euo pipefail
# No cd: paths on the command line are the caller's.
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)"

"$root/scripts/setup_env.sh"
exec "$root/.venv/bin/python" -m optimus_cc_ext.evaluation perplexity "$@"
