#!/usr/bin/env bash
# Sets .venv up, then runs linters, the type check and tests.
#   scripts/test.sh [--fast | --ci | --full | --megatron VERSION | --torch VERSION] [pytest arguments]
# Without arguments it tests every law of the design (CONTRIBUTING.md), in minutes on 2 cores.
# --fast: linters and tests/unit only.
# --ci: also whole commands and further layouts, as CI runs them.
# --full: also what takes long; CONTRIBUTING.md says what that needs.
# --megatron VERSION: only the smoke test of that megatron-core (0.17.1, 0.18.2, 0.19.0 or 0.19.2), which is fetched into
#   .megatron/VERSION, without its dependencies, and put before .venv's own; .venv stays as it is. On GPUs, where there
#   are (docs/evidence.md).
# --torch VERSION: the same smoke test with that torch (2.9.0 or newer), which is fetched into .torch/VERSION with all that
#   pip resolves for it (Triton, CUDA's libraries: 3 GB to download, 7 GB on disk). More tests: name them behind VERSION.
# Tests are shared out to 2 workers; add -n0 for a debugger. Ends with the slowest tests and pytest's own closing line;
# exit code != 0 if anything failed, or in CI (CI=true) if --ci took too long.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

die() {
  printf 'error: %s\n' "$1" >&2
  exit 2
}

MOST_MINUTES=26 # time limit of --ci in CI: its tests took 12.5 to 20 minutes, as the machine's other users allowed
targets=()
limited="${1:-}"
package=""
case "${1:-}" in
  --fast)
    targets=(tests/unit)
    shift
    ;;
  --megatron | --torch)
    package="${1#--}" version="${2:-}"
    [[ "$version" =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || die "$1 needs a version, such as 0.18.2 of Megatron or 2.9.1 of torch"
    targets=(tests/megatron/test_versions.py)
    shift 2
    ;;
esac

./scripts/setup_env.sh
SECONDS=0
export PATH="$PWD/.venv/bin:$PATH"
# Tests run several processes on few cores, and more threads than cores are slower by far.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

failed=()
check() {
  local name="$1"
  shift
  echo "== $name"
  "$@" </dev/null || failed+=("$name")
}

# Puts the folder .$package/$version before .venv's packages. If it is missing, pip fetches it with the arguments $@,
# under another name first, so that a folder of this name is complete.
put_in_front() {
  local folder=".$package/$version"
  echo "== $*"
  if [[ ! -d "$folder" ]]; then
    rm -rf "$folder.partial"
    # pip's cache is off, because it would keep a second copy of torch.
    python -m pip install --disable-pip-version-check --no-input --no-cache-dir --quiet --target "$folder.partial" "$@" \
      </dev/null || die "$package $version could not be fetched (pip's message is above)"
    mv "$folder.partial" "$folder"
  fi
  export PYTHONPATH="$PWD/$folder${PYTHONPATH:+:$PYTHONPATH}"
}

if [[ "$package" == megatron ]]; then
  put_in_front --no-deps "megatron-core==$version"
  export OPTIMUS_CC_TEST_MEGATRON="$version"
elif [[ "$package" == torch ]]; then
  put_in_front "torch==$version"
  export OPTIMUS_CC_TEST_TORCH="$version"
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
# Without arguments pytest takes `testpaths` from pytest.ini; a path from the user replaces them.
python -m pytest -n 2 --durations=25 --durations-min=1 "${targets[@]}" "$@" </dev/null || status=$?
if [[ ${#failed[@]} -gt 0 ]]; then
  printf 'failed before the tests: %s\n' "${failed[*]}" >&2
  status=1
fi
if [[ "${CI:-}" == true && "$limited" == --ci && $SECONDS -gt $((60 * MOST_MINUTES)) ]]; then
  printf 'this took %d s, and may take %d minutes: mark what is slow as full, or make it faster\n' \
    "$SECONDS" "$MOST_MINUTES" >&2
  status=1
fi
exit "$status"
