# shellcheck shell=bash
# Bytes of a file, to standard output; exit code 3 where it is gone. Arguments: the path, the first byte, how many.
# shellcheck source=scripts/remote/there/prelude.sh
: "${root:?}" "${session:?}"
enter
[[ -e $1 ]] || exit 3
# tail ends by a broken pipe when head has enough.
{ tail -c "+$(($2 + 1))" -- "$1" || true; } | head -c "$3"
