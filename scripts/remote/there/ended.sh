# shellcheck shell=bash
# Of a launch its name, exit code (nothing where it has none) and run directory, a line each.
# Argument: its name, or nothing for the last.
# shellcheck source=scripts/remote/there/prelude.sh
: "${root:?}" "${session:?}"
enter
launch=.remote/launches/$1
[[ -n $1 ]] || launch=$(last_launch) || fail "nothing was trained in $root yet: just train config=FILE"
[[ -d $launch ]] || fail "$root has no launch $1 any more"
printf '%s\n' "${launch##*/}"
cat "$launch/code" 2>/dev/null || echo
cat "$launch/directory"
