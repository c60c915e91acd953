# shellcheck shell=bash
# Write a file, which gets its name once it is whole. Standard input is the SHA-256 of the whole in a line, and bytes.
# Arguments: the path, the bytes of the unfinished part that stay, the bytes of the whole, the mode.
# shellcheck source=scripts/remote/there/prelude.sh
: "${root:?}" "${session:?}"
enter
path=$1 kept=$2 size=$3 mode=$4
IFS= read -r hash || fail "$root/$path did not come whole"
digits=${hash:0:12}
[[ $mode != 600 ]] || digits=000000000000 # of a secret, none is in a name
part=$path.$digits.part

[[ ! -d $path ]] || fail "$root/$path is a folder there and a file here: move it away"
umask 077
(umask 022 && mkdir -p -- "$(dirname -- "$path")")
exec 9>>"$part"
if ! flock -n 9; then
    # Another send; or one whose connection was lost, which gets no more bytes.
    before=$(stat -c %s -- "$part" 2>/dev/null || true)
    sleep 1
    [[ $(stat -c %s -- "$part" 2>/dev/null || true) == "$before" ]] ||
        fail "$root/$path is sent by another just now: wait for that, and run the same again"
fi
[[ $part -ef /proc/$$/fd/9 ]] || fail "$root/$path was sent by another just now: run the same again"
truncate -s "$kept" -- "$part"
cat >&9 2>/dev/null || fail "$root/$path cannot be written: $(df -h --output=avail . | tail -n 1 | tr -d ' ') are free there"
found=$(sha256sum <"$part")
if [[ ${found%% *} != "$hash" ]]; then
    # A shorter part is what the same command goes on with.
    [[ $(stat -c %s -- "$part") -lt $size ]] || rm -f -- "$part"
    fail "$root/$path did not come whole: run the same again"
fi

if [[ -f $path ]]; then
    # What was edited here, and so never came from there, is kept; no SHA-256 is in a command line.
    found=$(sha256sum <"$path")
    if [[ ${found%% *} != "$hash" ]] && ! grep -qxF -f <(printf '%s\n' "${found%% *}") \
        <(cat .remote/sent 2>/dev/null; cut -c -64 .remote/manifest 2>/dev/null); then
        edited=.remote/edited/$(date +%Y%m%d-%H%M%S)
        mkdir -p -- "$edited/$(dirname -- "$path")"
        cp -- "$path" "$edited/$path" || fail "$root/$path was edited there and cannot be kept: it is not replaced"
        chmod 600 -- "$edited/$path"
        echo "edited on $HOSTNAME, kept as $root/$edited/$path" >&2
    fi
fi
grep -qsxF -f <(printf '%s\n' "$hash") .remote/sent || printf '%s\n' "$hash" >>.remote/sent
chmod "$mode" -- "$part"
mv -fT -- "$part" "$path"
