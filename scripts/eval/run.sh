# shellcheck shell=bash
# Sourced by the scripts of this folder: runs one of its Python modules, in whatever folder they are called.

# The folder's name is the lock's hash, given once all is installed: a folder of this name is complete and fits.
harness_folder() { echo "$1/.eval/$(sha256sum "$1/requirements-eval.lock" | cut -c1-12)"; } # ROOT

# Becomes `python -m scripts.eval.MODULE ARGUMENTS`. In a checkout the module harness takes lm-evaluation-harness from
# requirements-eval.lock: the first call fetches it into .eval/, before .venv's own packages, which stay as they are.
run_module() { # ROOT MODULE ARGUMENTS...
  local root="$1" module="$2" python folder path="$1"
  # A Slurm job uses the packages that were installed before it.
  [[ -n "${SLURM_JOB_ID:-}" ]] || "$root/scripts/setup_env.sh"
  # shellcheck source=scripts/find_python.sh
  source "$root/scripts/find_python.sh"
  python="$(find_python "$root")"
  if [[ "$module" == harness && -f "$root/requirements-eval.lock" && ! " $* " =~ " "(-h|--help)" " ]]; then
    folder="$(harness_folder "$root")"
    if [[ ! -d "$folder" ]]; then
      echo "fetching lm-evaluation-harness: about 600 MB (only this first time)" >&2
      rm -rf "$folder.partial"
      "$python" -m pip install --disable-pip-version-check --no-input --quiet --no-deps \
        --target "$folder.partial" -r "$root/requirements-eval.lock" >&2
      mv "$folder.partial" "$folder"
    fi
    [[ " $* " != *" --fetch "* ]] || return 0
    path="$folder:$root"
  fi
  # With -P Python does not import from the current folder, which is the caller's.
  PYTHONPATH="$path${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -P -m "scripts.eval.$module" "${@:3}"
}
