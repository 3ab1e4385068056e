#!/usr/bin/env bash
# Table 2, figure 9, table 4: GPT-2.5B, compressed backpropagation with lazy error propagation,
# fused embedding synchronisation, selective stage compression (CB+FE+SC).
# shellcheck source=scripts/paper/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
model 2.5b
pretraining
techniques cb lep fe sc
run "$@"
