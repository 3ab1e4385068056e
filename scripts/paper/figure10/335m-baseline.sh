#!/usr/bin/env bash
# Figure 10: GPT-335M, without compression (Baseline).
# shellcheck source=scripts/paper/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
model 335m
breakdown
run "$@"
