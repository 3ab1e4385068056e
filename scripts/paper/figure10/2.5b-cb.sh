#!/usr/bin/env bash
# Figure 10: GPT-2.5B, compressed backpropagation with lazy error propagation (CB).
# shellcheck source=scripts/paper/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
model 2.5b
breakdown
techniques cb lep
run "$@"
