#!/usr/bin/env bash
# Table 2, figure 9, table 4: GPT-8.3B, compressed backpropagation with lazy error propagation (CB).
# shellcheck source=scripts/paper/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
model 8.3b
pretraining
techniques cb lep
run "$@"
