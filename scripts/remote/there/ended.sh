# shellcheck shell=bash
# How the last launch ended: its exit code (nothing where it has none) and its run directory, a line each.
# shellcheck source=scripts/remote/there/prelude.sh
: "${root:?}" "${session:?}"
enter
launch=.remote/launches/last
cat "$launch/code" 2>/dev/null || echo
cat "$launch/directory"
