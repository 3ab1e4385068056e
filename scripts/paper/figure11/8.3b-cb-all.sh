#!/usr/bin/env bash
# Figure 11: GPT-8.3B, every message compressed, with lazy error propagation.
# shellcheck source=scripts/paper/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
model 8.3b
error_statistics
techniques cb lep
run "$@"
