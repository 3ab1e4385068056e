#!/usr/bin/env bash
# Runs Megatron-LM's own unit tests three times, test by test: vanilla, with this extension off, with lossless messages.
# The difference to vanilla is the result. Needs a checkout of Megatron-LM, pytest and pytest-mock; runs on GPUs where
# there are any, else on the CPU. Results are kept in --results, and a second start goes on where the first one ended.
#   scripts/compat_tests.sh CHECKOUT [--only TEXT] [--ranks 2 4 8] [--limit SECONDS] [--results FOLDER]
# Prints Markdown tables; docs/compatibility.md has them for one tag.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
# shellcheck source=scripts/find_python.sh
source "$root/scripts/find_python.sh"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1
python="$(find_python "$root")"
exec "$python" -P -m scripts.compat.unit_tests "$@"
