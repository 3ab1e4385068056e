#!/usr/bin/env bash
# Writes the reference of the Python API, from the docstrings of the names that other programs call:
#
#   scripts/api_reference.sh FILE
set -euo pipefail
[[ $# == 1 && "$1" != -* ]] || {
  echo "api_reference.sh: error: no file is given, so there is nothing to write. Write scripts/api_reference.sh FILE." >&2
  exit 2
}
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
# shellcheck source=scripts/find_python.sh
source "$root/scripts/find_python.sh"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
python="$(find_python "$root")"
exec "$python" -P -m scripts.api_reference "$1"
