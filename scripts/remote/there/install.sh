# shellcheck shell=bash
# Put the tracked files, which come as a tar on standard input, into the root. All are checked aside before one is
# changed. Argument: what the tree is, in words.
# shellcheck source=scripts/remote/there/prelude.sh
: "${root:?}" "${session:?}"
enter
refuse_running
export LC_ALL=C

stage=.remote/incoming
rm -rf -- "$stage"
mkdir -m 700 -- "$stage"
give_up() {
    rm -rf -- "$stage"
    fail "$1: nothing was changed"
}
# Of many complaints, as of a full disk, the first tells all.
said=$(tar --extract --gzip --no-same-owner --directory "$stage" --file - 2>&1) ||
    give_up "the tree did not come whole (${said%%$'\n'*})"
# The manifest comes last, so that a stream that was cut has none.
if [[ ! -f $stage/manifest ]] || ! (cd "$stage/tree" && sha256sum --check --status --strict ../manifest); then
    give_up "the tree did not come whole, run the same again"
fi

# What comes; what came before, and comes no more; the SHA-256 of all that ever came.
(cd "$stage/tree" && find . ! -type d -printf '%P\n') | sort >"$stage/new"
touch .remote/manifest .remote/sent
cut -c 67- .remote/manifest | sort | comm -23 - "$stage/new" >"$stage/gone"
cut -c -64 .remote/manifest | sort -u - .remote/sent >"$stage/sent"

in_the_way() {
    local path
    while IFS= read -r path; do
        [[ -d $path || (! -e $path && ! -L $path) ]] || printf '%s\n' "$path"
    done < <(cd "$stage/tree" && find . -mindepth 1 -type d -printf '%P\n')
    while IFS= read -r path; do
        [[ ! -d $path || -L $path ]] || find "./$path" ! -type d -printf '%p\n' | cut -c 3-
    done <"$stage/new"
}
other=$(in_the_way | sort | comm -23 - "$stage/gone" | sed -n 1p)
[[ -z $other ]] || give_up "$root/$other is in the way of the tree, where a file is a folder or a folder a file: move it away"

# What was edited here, and so never came from there, is kept before it is overwritten.
edited=.remote/edited/$(date +%Y%m%d-%H%M%S)
cat "$stage/new" "$stage/gone" | while IFS= read -r path; do
    [[ ! -f $path || -L $path ]] || printf '%s\0' "$path"
done | xargs -0 -r sha256sum -- | sort | comm -23 - <(sort "$stage/manifest") |
    { grep -vFf "$stage/sent" || true; } | cut -c 67- >"$stage/edited"
while IFS= read -r path; do
    (umask 077 && mkdir -p -- "$edited/$(dirname -- "$path")")
    cp -- "$path" "$edited/$path" 2>/dev/null || give_up "$root/$path was edited there and cannot be kept"
    chmod 600 -- "$edited/$path"
done <"$stage/edited"
if [[ -s $stage/edited ]]; then
    mapfile -t names <"$stage/edited"
    printf -v listed '%s, ' "${names[@]:0:5}"
    more=
    [[ ${#names[@]} -le 5 ]] || more=" and $((${#names[@]} - 5)) more"
    echo "edited on $HOSTNAME, kept in $root/$edited: ${listed%, }$more"
fi

cut -c -64 "$stage/manifest" | sort -u - "$stage/sent" >.remote/sent.part
chmod 600 .remote/sent.part # of secrets too
mv -- .remote/sent.part .remote/sent
while IFS= read -r path; do
    rm -f -- "$path"
done <"$stage/gone"
while IFS= read -r path; do
    # What it held comes no more.
    [[ ! -d $path || -L $path ]] || find "./$path" -depth -type d -delete
done <"$stage/new"
(cd "$stage/tree" && find . -type d -printf '%P\0') | while IFS= read -r -d '' folder; do
    mkdir -p -- "./$folder" 2>/dev/null || fail "$root/$folder cannot be made: see to that, and run the same again"
    find "$stage/tree/$folder" -mindepth 1 -maxdepth 1 ! -type d -exec mv -f -t "./$folder" -- {} +
done
mv -- "$stage/manifest" .remote/manifest
printf '%s\n' "$1" >.remote/tree
rm -rf -- "$stage"
