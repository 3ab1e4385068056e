# shellcheck shell=bash
# Sourced by the scripts of this folder: runs a module of it, from wherever they are called.

# Becomes `python -m scripts.eval.MODULE ARGUMENTS`. In a checkout harness takes lm-evaluation-harness from
# requirements-eval.lock: the first call fetches it into .eval/, before .venv's own packages, which stay as they are.
run_module() { # ROOT MODULE ARGUMENTS...
  local root="$1" module="$2" python folder path="$1"
  # A job takes what was installed before it.
  [[ -n "${SLURM_JOB_ID:-}" ]] || "$root/scripts/setup_env.sh"
  # shellcheck source=scripts/find_python.sh
  source "$root/scripts/find_python.sh"
  python="$(find_python "$root")"
  if [[ "$module" == harness && -f "$root/requirements-eval.lock" ]]; then
    # Named after what it holds, and under another name first: what is there is whole and is what the lock says.
    folder="$root/.eval/$(sha256sum "$root/requirements-eval.lock" | cut -c1-12)"
    if [[ ! -d "$folder" ]]; then
      echo "fetching lm-evaluation-harness: about 600 MB (only this first time)" >&2
      rm -rf "$folder.partial"
      "$python" -m pip install --disable-pip-version-check --no-input --quiet --no-deps \
        --target "$folder.partial" -r "$root/requirements-eval.lock" >&2
      mv "$folder.partial" "$folder"
    fi
    path="$folder:$root"
  fi
  # -P: the current folder is the caller's, and no place to import from.
  PYTHONPATH="$path${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -P -m "scripts.eval.$module" "${@:3}"
}
