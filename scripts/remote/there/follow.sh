# shellcheck shell=bash
# The output of a launch until it ends. Arguments: its name, the bytes of it that were seen before.
# shellcheck source=scripts/remote/there/prelude.sh
: "${root:?}" "${session:?}"
enter
launch=.remote/launches/$1
[[ -f $launch/log ]] || fail "$root has no launch $1 any more"
alive "$launch" || exec tail -c "+$(($2 + 1))" "$launch/log"
exec tail -c "+$(($2 + 1))" -s 0.3 --pid "$(<"$launch/shell")" -f "$launch/log"
