#!/usr/bin/env bash
# Figure 10: GPT-335M, compressed backpropagation with lazy error propagation,
# fused embedding synchronisation (CB+FE).
# shellcheck source=scripts/paper/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
model 335m
breakdown
techniques cb lep fe
run "$@"
