#!/usr/bin/env bash
# Converts a Megatron checkpoint of any number of ranks to a folder that transformers reads (GPT-2). Needs no GPU.
#   scripts/eval/convert.sh --checkpoint DIR --output DIR [--tokenizer DIR] [--iteration N]      (--help shows all)
set -euo pipefail
# The script stays in the current folder, because paths on the command line are the caller's.
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)"
# shellcheck source=scripts/eval/run.sh
source "$root/scripts/eval/run.sh"
run_module "$root" convert "$@"
