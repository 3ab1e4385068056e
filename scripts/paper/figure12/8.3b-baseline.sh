#!/usr/bin/env bash
# Figure 12: GPT-8.3B, without compression (Baseline).
# shellcheck source=scripts/paper/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
model 8.3b
memory
run "$@"
