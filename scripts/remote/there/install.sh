# shellcheck shell=bash
# Put the tracked files, which come as a tar on standard input, into the root: all of them or none.
# Argument: what the tree is, in words.
# shellcheck source=scripts/remote/there/prelude.sh
: "${root:?}" "${session:?}"
enter
refuse_running

stage=.remote/incoming
rm -rf -- "$stage"
mkdir -- "$stage"
tar --extract --gzip --no-same-owner --directory "$stage" --file - || fail "the tree did not come whole: nothing was changed"
# The manifest comes last, so that a stream that was cut has none.
if [[ ! -f $stage/manifest ]] || ! (cd "$stage/tree" && sha256sum --check --quiet --strict ../manifest >&2); then
    fail "the tree did not come whole: nothing was changed, run the same again"
fi

if [[ -f .remote/manifest ]]; then
    # What was edited here since it came is kept before it is overwritten.
    edited=.remote/edited/$(date +%Y%m%d-%H%M%S)
    { LC_ALL=C sha256sum --check --quiet .remote/manifest 2>/dev/null || true; } | sed -n 's/: FAILED$//p' |
        while IFS= read -r path; do
            if [[ -f $path ]] && ! cmp -s -- "$path" "$stage/tree/$path"; then
                mkdir -p -- "$edited/$(dirname -- "$path")"
                cp -a -- "$path" "$edited/$path"
                echo "edited on $HOSTNAME, kept as $root/$edited/$path"
            fi
        done
    # What is tracked no more goes.
    comm -23 <(cut -c 67- .remote/manifest | LC_ALL=C sort) <(cut -c 67- "$stage/manifest" | LC_ALL=C sort) |
        while IFS= read -r path; do
            rm -f -- "$path"
        done
fi
cp -a --remove-destination "$stage/tree/." .
mv -- "$stage/manifest" .remote/manifest
printf '%s\n' "$1" >.remote/tree
rm -rf -- "$stage"
