#!/usr/bin/env bash
# Figure 12: GPT-2.5B, compressed backpropagation with lazy error propagation (CB+LEP).
# shellcheck source=scripts/paper/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
model 2.5b
memory
techniques cb lep
run "$@"
