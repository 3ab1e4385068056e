#!/usr/bin/env bash
# Measures a converted model's perplexity of a text, by word and byte, with lm-evaluation-harness.
#   scripts/eval/perplexity.sh --model DIR --text FILE [--sequence-length N] [...]      (--help shows all)
set -euo pipefail
# The script stays in the current folder, because paths on the command line are the caller's.
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)"
# shellcheck source=scripts/eval/run.sh
source "$root/scripts/eval/run.sh"
# Hugging Face's hub is not asked, so that nothing waits for it.
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
run_module "$root" harness "$@"
