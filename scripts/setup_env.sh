#!/usr/bin/env bash
# Makes .venv in the repository from requirements.lock. quickstart.sh and test.sh call it first; a second run takes
# a moment. Use .venv/bin/python, or `source .venv/bin/activate`. In an installed package the script does nothing.
#
#   OPTIMUS_CC_PYTHON=/path/to/python   use this interpreter (3.12 or 3.13) instead of searching for one
#   scripts/setup_env.sh --find-python  only print the interpreter that would be used

# Everything runs in functions with a subshell for a body: sourcing this file changes nothing in the caller's shell.
_optimus_cc_setup() (
  set -euo pipefail
  root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
  venv="$root/.venv"
  stamp="$venv/.optimus_cc_stamp"
  rejected=()

  say() { printf '[setup] %s\n' "$*" >&2; }
  die() {
    say "error: $1"
    shift
    [[ $# -eq 0 ]] || printf '        %s\n' "$@" >&2
    exit 1
  }

  # Sets `found` to the interpreter behind candidate $1, or `why` to the reason it cannot be used.
  # _base_executable is asked, because in an activated .venv "python3" is the interpreter that a rebuild deletes.
  inspect_python() {
    local out
    found="" why=""
    if ! out="$("$1" -I -c '
import sys
if not (3, 12) <= sys.version_info[:2] <= (3, 13):
    print("is Python %d.%d" % sys.version_info[:2])
else:
    missing = []
    for name in ("venv", "ensurepip", "ssl", "ctypes"):
        try:
            __import__(name)
        except ImportError:
            missing.append(name)
    if missing:
        print("lacks the modules: " + ", ".join(missing))
    else:
        print("ok " + getattr(sys, "_base_executable", sys.executable))
' 2>/dev/null </dev/null)"; then
      why="does not run"
    elif [[ "$out" == "ok "* ]]; then
      found="${out#ok }"
    else
      why="$out"
    fi
    [[ -n "$found" ]]
  }

  # Prints one candidate a line, the preferred ones first: 3.12 before 3.13, because 3.12 has been tested for longer.
  list_candidates() {
    local name dir conda_root home="${HOME:-/nonexistent}"
    for name in python3.12 python3.13 python3; do
      type -aP "$name" || true
    done
    # pyenv's interpreters exist even if pyenv is not on PATH, or selects another version.
    for dir in "${PYENV_ROOT:-$home/.pyenv}"/versions/{3.12,3.13}.*/bin/python3; do
      if [[ -x "$dir" ]]; then echo "$dir"; fi
    done
    if command -v uv >/dev/null; then
      for name in 3.12 3.13; do
        UV_PYTHON_DOWNLOADS=never uv python find --no-project --system "$name" 2>/dev/null </dev/null || true
      done
    fi
    conda_root="${CONDA_EXE:-}"
    for dir in "${CONDA_PREFIX:-}" "${conda_root%/bin/conda}" "$home"/{miniforge3,miniconda3,mambaforge,anaconda3} \
      "$home"/.conda /opt/{conda,miniforge3,miniconda3,anaconda3}; do
      [[ -n "$dir" ]] || continue
      for name in "$dir"/bin/python3 "$dir"/envs/*/bin/python3; do
        if [[ -x "$name" ]]; then echo "$name"; fi
      done
    done
  }

  # Sets `python`, or ends with a message that names the package to install.
  find_python() {
    local candidate
    if [[ -n "${OPTIMUS_CC_PYTHON:-}" ]]; then
      inspect_python "$OPTIMUS_CC_PYTHON" ||
        die "OPTIMUS_CC_PYTHON=$OPTIMUS_CC_PYTHON cannot be used: it ${why}." \
          "It must be Python 3.12 or 3.13 with the modules venv, ensurepip, ssl and ctypes. Unset it to search for one."
      python="$found"
      return
    fi
    while IFS= read -r candidate; do
      if inspect_python "$candidate"; then
        python="$found"
        return
      fi
      rejected+=("$candidate $why")
    done < <(list_candidates | awk '!seen[$0]++')
    [[ ${#rejected[@]} -gt 0 ]] || rejected=("(nothing)")
    die "no usable Python 3.12 or 3.13 was found (megatron-core 0.19.2 has wheels for these two)." \
      "Install one of them, for example with one of:" \
      "  Debian, Ubuntu:  apt install python3.12 python3.12-venv" \
      "  uv:              uv python install 3.12" \
      "  pyenv:           pyenv install 3.12" \
      "  conda:           conda create -n py312 python=3.12" \
      "or set OPTIMUS_CC_PYTHON to one. Looked on PATH, in pyenv, uv and conda; found:" \
      "${rejected[@]/#/  }"
  }

  # Prints the stamp of a finished environment: its sources; empty if there is no interpreter in .venv.
  # The path is part of the stamp: after a move the environment's scripts would point to the old place.
  fingerprint() {
    local version
    version="$("$1" -I -S -c 'import sys; print(sys.version)' 2>/dev/null </dev/null)" || return 0
    cat "$root"/{requirements.lock,pyproject.toml,setup.py,optimus_cc_ext/_version.py} - \
      <<<"$root $version" | sha256sum | cut -d' ' -f1
  }

  is_finished() {
    local now
    [[ -f "$stamp" ]] || return 1
    now="$(fingerprint "$venv/bin/python")"
    [[ -n "$now" && "$now" == "$(cat "$stamp")" ]] || return 1
    # OPTIMUS_CC_PYTHON replaces an environment that another interpreter has made.
    [[ -z "${OPTIMUS_CC_PYTHON:-}" ]] || [[ "$now" == "$(fingerprint "$OPTIMUS_CC_PYTHON")" ]]
  }

  install_lock() {
    # uv reads none of pip's settings (proxies, certificates, mirrors): if uv fails, pip may still work.
    if command -v uv >/dev/null; then
      uv pip install --python "$venv/bin/python" -r "$root/requirements.lock" && return
      say "uv could not install the packages; trying pip"
    fi
    # Python compiles what is imported; compiling everything takes a third of the time.
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --no-compile -r "$root/requirements.lock"
  }

  build() {
    say "Python: $python"
    say "making .venv from requirements.lock: about 5 GB, some minutes (only this first time)"
    # The stamp is removed first and written last, so that an interrupted set-up is not taken for finished.
    rm -f "$stamp"
    "$python" -m venv --clear "$venv" || die "'$python -m venv' failed (its message is above)."
    install_lock || die "installing requirements.lock failed (pip's message is above)." \
      "Usual causes: no network or proxy settings, or less than 6 GB free on $(df -P "$root" | awk 'NR == 2 {print $6}'). Run it again."
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --quiet \
      --no-deps --no-build-isolation --use-pep517 -e "$root" ||
      die "installing optimus_cc_ext itself failed (pip's message is above)."
    fingerprint "$venv/bin/python" >"$stamp.new"
    mv "$stamp.new" "$stamp"
    say "done: .venv is ready"
  }

  case "${1:-}" in
    "") ;;
    --find-python)
      find_python
      echo "$python"
      exit 0
      ;;
    *) die "unknown argument: $1" "usage: scripts/setup_env.sh [--find-python]" ;;
  esac

  # Beside a package from a wheel the environment is the caller's.
  [[ -f "$root/setup.py" ]] || exit 0
  if is_finished; then exit 0; fi
  [[ ! -L "$venv" ]] || die "$venv is a link, and making it anew would delete the files that it points to." \
    "Remove the link (the files stay), and run this again."
  # One set-up at a time; the kernel frees the lock when its holder ends, however it ends.
  exec 9>"$root/.venv.lock"
  if command -v flock >/dev/null && ! flock -n 9; then
    say "another set-up is running in this repository; waiting for it"
    flock 9
    if is_finished; then exit 0; fi
  fi
  find_python
  # Lines go to stderr: stdout belongs to the calling script.
  build >&2
)

_optimus_cc_setup "$@"
