# shellcheck shell=bash
# Sourced by other scripts: finds their Python, and the folder that they write to. ROOT holds scripts/: a checkout of
# the repository, or the folder that `optimus-cc files` prints, where the package is installed.

# Prints the interpreter of ROOT/.venv, or without .venv (an installed package) `python` on PATH; fails without either,
# or if it is older than the package's syntax.
find_python() { # ROOT
  if [[ -x "$1/.venv/bin/python" ]]; then
    echo "$1/.venv/bin/python"
  elif command -v python; then
    python -c 'import sys; sys.exit(sys.version_info < (3, 12))' || {
      echo "error: python on PATH is older than 3.12. Activate the environment that optimus_cc_ext is installed in" >&2
      return 2
    }
  else
    return 1
  fi
}

# Prints the folder of results/ and data/: ROOT, or the current folder if ROOT is part of an installed package.
find_workspace() { # ROOT
  if [[ -f "$1/setup.py" ]]; then echo "$1"; else pwd; fi
}
