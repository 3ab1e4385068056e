#!/usr/bin/env bash
# Table 2, figure 9, table 4: GPT-335M, compressed backpropagation with lazy error propagation,
# fused embedding synchronisation (CB+FE).
# shellcheck source=scripts/paper/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
model 335m
pretraining
techniques cb lep fe
run "$@"
