#!/usr/bin/env bash
# A Megatron checkpoint -> a folder that transformers reads (Hugging Face's GPT-2). Any number of ranks; no GPU needed.
#   scripts/eval/convert.sh --checkpoint DIR --output DIR [--tokenizer DIR] [--iteration N]      (--help shows all)
set -euo pipefail
# No cd: paths on the command line are the caller's.
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)"
# shellcheck source=scripts/eval/run.sh
source "$root/scripts/eval/run.sh"
run_module "$root" convert "$@"
