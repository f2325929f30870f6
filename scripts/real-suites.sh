#!/bin/sh
# Run the two suites of `make test-real` side by side: those with real servers, which often wait, and below them, at a
# lower priority, the properties with many examples. The output of the latter is shown at the end.
# $BIN: the environment's programs. $REAL, $THOROUGH: pytest's options of each suite. $@: further options of both.
set -u

# A property with many examples is no hang: each may take an hour in what the other suite leaves.
report=$(mktemp)
GPUTALLY_THOROUGH=1 nice -n 5 "$BIN/pytest" -m "(thorough or hypothesis) and not real" --timeout 3600 $THOROUGH "$@" >"$report" 2>&1 &
beside=$!
trap 'kill $beside 2>/dev/null; rm -f "$report"' EXIT
trap 'exit 130' INT TERM

"$BIN/pytest" -m real $REAL "$@"
real=$?
echo "waiting for the properties with many examples"
wait $beside
thorough=$?
cat "$report"
[ $real -eq 0 ] && [ $thorough -eq 0 ]
