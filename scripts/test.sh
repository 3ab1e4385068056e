#!/usr/bin/env bash
# Set-up, linters, type check, tests.
#   scripts/test.sh [--fast | --full | --megatron VERSION] [pytest arguments]
# Without arguments: every law of the design that a test can hold, in minutes on 2 cores.
# --fast: linters and tests/unit only.
# --full: also what takes long; CONTRIBUTING.md says what that needs.
# --megatron VERSION: only the smoke test of that megatron-core (0.17.1, 0.18.2, 0.19.0 or 0.19.2), which is fetched into
#   .megatron/VERSION, without its dependencies, and put before .venv's own; .venv stays as it is. On GPUs, where there
#   are (docs/gpu.md).
# Tests are shared out to 2 workers; add -n0 for a debugger. Ends with the slowest tests and pytest's own closing line;
# exit code != 0 if anything failed, or in CI (CI=true) if it took too long.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

die() {
  printf 'error: %s\n' "$1" >&2
  exit 2
}

MOST_MINUTES=12 # in CI, of a run without arguments
# Without AVX-512 products in bf16 take many times those in fp32: 16 minutes were seen, where others need 6 to 8.
grep -qs avx512f /proc/cpuinfo || MOST_MINUTES=20
targets=()
arguments=$#
version=""
case "${1:-}" in
  --fast)
    targets=(tests/unit)
    shift
    ;;
  --megatron)
    version="${2:-}"
    [[ "$version" =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || die "--megatron needs a version, such as 0.18.2"
    targets=(tests/megatron/test_versions.py)
    shift 2
    ;;
esac

./scripts/setup_env.sh
SECONDS=0
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

# Makes .megatron/$1, unless it is there: under another name first, so that what is there is whole.
fetch_megatron() {
  local folder=".megatron/$1"
  [[ ! -d "$folder" ]] || return 0
  rm -rf "$folder.partial"
  python -m pip install --disable-pip-version-check --no-input --quiet --no-deps --target "$folder.partial" \
    "megatron-core==$1" </dev/null || die "megatron-core $1 could not be fetched (pip's message is above)"
  mv "$folder.partial" "$folder"
}

if [[ -n "$version" ]]; then
  echo "== megatron-core $version"
  fetch_megatron "$version"
  export PYTHONPATH="$PWD/.megatron/$version${PYTHONPATH:+:$PYTHONPATH}" OPTIMUS_CC_TEST_MEGATRON="$version"
else
  mapfile -t shell_files < <(find scripts .ci patches tests -name '*.sh' -o -name '*.sbatch' -o -path .ci/run | sort)
  check "ruff check" ruff check .
  check "ruff format" ruff format --check .
  check "mypy" mypy optimus_cc_ext
  check "shellcheck" shellcheck -x "${shell_files[@]}"
  check "hadolint" hadolint Dockerfile
fi

echo "== pytest"
status=0
# Without arguments pytest takes `testpaths` from pytest.ini. A path given by the user replaces that.
python -m pytest -n 2 --durations=25 --durations-min=1 "${targets[@]}" "$@" </dev/null || status=$?
if [[ ${#failed[@]} -gt 0 ]]; then
  printf 'failed before the tests: %s\n' "${failed[*]}" >&2
  status=1
fi
if [[ "${CI:-}" == true && $arguments -eq 0 && $SECONDS -gt $((60 * MOST_MINUTES)) ]]; then
  printf 'this took %d s, and may take %d minutes: mark what is slow as full, or make it faster\n' \
    "$SECONDS" "$MOST_MINUTES" >&2
  status=1
fi
exit "$status"
