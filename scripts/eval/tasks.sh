#!/usr/bin/env bash
# Zero-shot tasks by lm-evaluation-harness, by a converted model.
#   scripts/eval/tasks.sh --model DIR                the paper's tasks; their data come from Hugging Face's hub
#   scripts/eval/tasks.sh --local --model DIR        the questions of scripts/eval/tasks/, without a network
# More flags: --tasks A,B --include-path DIR --limit N --batch-size N --output FILE      (--help shows all)
# The first call fetches the harness from requirements-eval.lock into .eval/, before .venv's own; .venv stays as it is.
set -euo pipefail
# No cd: paths on the command line are the caller's.
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)"

flags=()
if [[ "${1:-}" == "--local" ]]; then
  shift
  flags=(--include-path "$root/scripts/eval/tasks" --tasks "local_last_word,local_choice,local_text")
  # Nothing is asked of the hub, so that nothing waits for it.
  export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
fi

"$root/scripts/setup_env.sh"
# Named after what it holds, and under another name first: what is there is whole and is what the lock says.
harness="$root/.eval/$(sha256sum "$root/requirements-eval.lock" | cut -c1-12)"
if [[ ! -d "$harness" ]]; then
  echo "fetching lm-evaluation-harness: about 600 MB (only this first time)" >&2
  rm -rf "$harness.partial"
  "$root/.venv/bin/python" -m pip install --disable-pip-version-check --no-input --quiet --no-deps \
    --target "$harness.partial" -r "$root/requirements-eval.lock" >&2
  mv "$harness.partial" "$harness"
fi
export PYTHONPATH="$harness${PYTHONPATH:+:$PYTHONPATH}"
exec "$root/.venv/bin/python" -m optimus_cc_ext.evaluation tasks ${flags[@]+"${flags[@]}"} "$@"
