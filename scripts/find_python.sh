# shellcheck shell=bash
# Sourced by other scripts: which Python runs this repository.

# Prints the interpreter of ROOT/.venv, or where there is none (in images) the `python` on PATH; fails without either.
find_python() { # ROOT
  if [[ -x "$1/.venv/bin/python" ]]; then
    echo "$1/.venv/bin/python"
  else
    command -v python
  fi
}
