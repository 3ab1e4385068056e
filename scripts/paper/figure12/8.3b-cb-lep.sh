#!/usr/bin/env bash
# Figure 12: GPT-8.3B, compressed backpropagation with lazy error propagation (CB+LEP).
# shellcheck source=scripts/paper/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
model 8.3b
memory
techniques cb lep
run "$@"
