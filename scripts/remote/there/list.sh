# shellcheck shell=bash
# The files of files or folders under the root: size, SHA-256 and path, or the target of a link, each ended by a NUL.
# Nothing of what is not there, or goes meanwhile, as checkpoints of a run do. Arguments: "all", or "newest" for checkpoints that a link names only; the paths.
# shellcheck source=scripts/remote/there/prelude.sh
: "${root:?}" "${session:?}"
enter
which=$1
shift
paths=()
for path in "$@"; do
    [[ ! -e $path ]] || paths+=("$path")
done
[[ ${#paths[@]} -gt 0 ]] || exit 0

wanted() {
    local folder name link
    [[ $1 != .lock && $1 != */.lock ]] || return 1
    # What a run writes aside, and renames.
    [[ ! $1 =~ (^|/)[^/]*\.tmp-(old|[0-9a-f]{8})(/|$) ]] || return 1
    [[ $2 == newest && $1 == */checkpoints/*/* ]] || return 0
    folder=${1%%/checkpoints/*}/checkpoints
    name=${1#"$folder"/}
    for link in "$folder"/*; do
        if [[ -L $link && $(readlink -- "$link") == "${name%%/*}" ]]; then
            return 0
        fi
    done
    return 1
}

given() {
    local path
    for path in "${paths[@]}"; do
        [[ $path != "$1" ]] || return 0
    done
    return 1
}

# What was asked for by the name of a link is what it names.
find -H "${paths[@]}" -ignore_readdir_race \( -type f -o -type l \) -print0 | LC_ALL=C sort -z | {
    links=()
    while IFS= read -r -d '' file; do
        wanted "$file" "$which" || continue
        if [[ -L $file ]] && ! given "$file"; then
            links+=("$file")
        # Of that many bytes, since a record may grow meanwhile.
        elif size=$(stat -L -c %s -- "$file" 2>/dev/null) && hash=$(head -c "$size" -- "$file" 2>/dev/null | sha256sum); then
            printf '%s\t%s\t%s\0' "$size" "${hash%% *}" "$file"
        elif [[ -e $file ]]; then
            fail "$file cannot be read"
        fi
    done
    # As they are now: what they name did not go before it was listed.
    for file in "${links[@]}"; do
        ! target=$(readlink -- "$file") || printf 'link\t%s\t%s\0' "$target" "$file"
    done
}
