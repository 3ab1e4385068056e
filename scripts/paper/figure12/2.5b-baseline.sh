#!/usr/bin/env bash
# Figure 12: GPT-2.5B, without compression (Baseline).
# shellcheck source=scripts/paper/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
model 2.5b
memory
run "$@"
