# shellcheck shell=bash
# Make a link. Arguments: its path, its target.
# shellcheck source=scripts/remote/there/prelude.sh
: "${root:?}" "${session:?}"
enter
[[ -L $1 || ! -e $1 ]] || fail "$root/$1 is a file or folder there and a link here: move it away"
mkdir -p -- "$(dirname -- "$1")"
ln -sfnT -- "$2" "$1"
