#!/usr/bin/env bash
# Runs zero-shot tasks of lm-evaluation-harness on a converted model.
#   scripts/eval/tasks.sh --model DIR                the paper's tasks; their data come from Hugging Face's hub
#   scripts/eval/tasks.sh --local --model DIR        the questions of scripts/eval/tasks/, without a network
#   scripts/eval/tasks.sh --fetch                    only fetches the harness into .eval/, for jobs without a network
# All other flags are the harness's: --tasks A,B --include_path DIR --limit N --batch_size N --output_path FILE ...
set -euo pipefail
# The script stays in the current folder, because paths on the command line are the caller's.
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)"
# shellcheck source=scripts/eval/run.sh
source "$root/scripts/eval/run.sh"
[[ " $* " != *" --local "* ]] || export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
run_module "$root" harness "$@"
