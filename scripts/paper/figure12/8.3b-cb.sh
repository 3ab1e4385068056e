#!/usr/bin/env bash
# Figure 12: GPT-8.3B, compressed backpropagation without lazy error propagation (CB).
# shellcheck source=scripts/paper/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
model 8.3b
memory
techniques cb
run "$@"
