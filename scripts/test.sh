#!/usr/bin/env bash
# Set-up, linters, type check, tests.
#   scripts/test.sh [--fast] [pytest arguments]
# --fast: linters and tests/unit only. Ends with pytest's own closing line; exit code != 0 if anything failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

targets=()
if [[ "${1:-}" == "--fast" ]]; then
  targets=(tests/unit)
  shift
fi

./scripts/setup_env.sh
export PATH="$PWD/.venv/bin:$PATH"
# Tests run several processes on few cores: more threads than cores is slower by far.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

failed=()
check() {
  local name="$1"
  shift
  echo "== $name"
  "$@" </dev/null || failed+=("$name")
}

mapfile -t shell_files < <(find scripts .ci -name '*.sh' -o -path .ci/run | sort)
check "ruff check" ruff check .
check "ruff format" ruff format --check .
check "mypy" mypy optimus_cc_ext
check "shellcheck" shellcheck -x "${shell_files[@]}"

echo "== pytest"
status=0
# Without arguments pytest takes `testpaths` from pytest.ini. A path given by the user replaces that.
python -m pytest "${targets[@]}" "$@" </dev/null || status=$?
if [[ ${#failed[@]} -gt 0 ]]; then
  printf 'failed before the tests: %s\n' "${failed[*]}" >&2
  status=1
fi
exit "$status"
