#!/usr/bin/env bash
# Figure 10: GPT-8.3B, compressed backpropagation with lazy error propagation,
# fused embedding synchronisation (CB+FE).
# shellcheck source=scripts/paper/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
model 8.3b
breakdown
techniques cb lep fe
run "$@"
