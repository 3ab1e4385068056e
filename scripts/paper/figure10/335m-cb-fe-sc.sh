#!/usr/bin/env bash
# Figure 10: GPT-335M, compressed backpropagation with lazy error propagation,
# fused embedding synchronisation, selective stage compression (CB+FE+SC).
# shellcheck source=scripts/paper/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
model 335m
breakdown
techniques cb lep fe sc
run "$@"
