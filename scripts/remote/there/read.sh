# shellcheck shell=bash
# Bytes of a file, to standard output. Arguments: the path, the first byte, how many.
# shellcheck source=scripts/remote/there/prelude.sh
: "${root:?}" "${session:?}"
enter
# tail ends by a broken pipe when head has enough.
{ tail -c "+$(($2 + 1))" -- "$1" || true; } | head -c "$3"
