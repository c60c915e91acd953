# shellcheck shell=bash
# Write standard input to a file, which gets its name once it is whole.
# Arguments: the path, the path of the unfinished part, its bytes that stay, the SHA-256 of the whole, the mode.
# shellcheck source=scripts/remote/there/prelude.sh
: "${root:?}" "${session:?}"
enter
path=$1 part=$2 kept=$3 hash=$4 mode=$5
umask 077
(umask 022 && mkdir -p -- "$(dirname -- "$path")")
truncate -s "$kept" -- "$part"
cat >>"$part"
found=$(sha256sum <"$part")
[[ ${found%% *} == "$hash" ]] || fail "$root/$path did not come whole"
chmod "$mode" -- "$part"
mv -f -- "$part" "$path"
