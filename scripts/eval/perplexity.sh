#!/usr/bin/env bash
# Perplexity of a text, by word and byte, by a converted model and lm-evaluation-harness.
#   scripts/eval/perplexity.sh --model DIR --text FILE [--sequence-length N] [...]      (--help shows all)
set -euo pipefail
# No cd: paths on the command line are the caller's.
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)"
# shellcheck source=scripts/eval/run.sh
source "$root/scripts/eval/run.sh"
# Nothing is asked of the hub, so that nothing waits for it.
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
run_module "$root" harness "$@"
