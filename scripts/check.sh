#!/bin/sh
# Runs all checks that do not run the programs. Stops at the first fault.
set -eu
step() { printf '\033[1m[check]\033[0m %s\n' "$*"; }
step "format";           "$BIN/ruff" format --check --quiet .
step "lint";             "$BIN/ruff" check --quiet .
step "types (strict)";   "$BIN/mypy"
step "types (benchmarks, hardware)"; "$BIN/mypy" --explicit-package-bases tests/bench tests/hardware
step "import contracts"; "$BIN/lint-imports" --no-cache
step "dependencies";     "$BIN/deptry" .
step "dashboards";       "$BIN/gputally" dashboards check
