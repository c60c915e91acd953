# shellcheck shell=bash
# The root from /, which need not be there yet.
# shellcheck source=scripts/remote/there/prelude.sh
: "${root:?}" "${session:?}"
printf '%s' "$root"
