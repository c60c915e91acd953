# shellcheck shell=bash
# The files of files or folders under the root: size, SHA-256 and path, or the target of a link, each ended by a NUL.
# Nothing of what is not there. Arguments: "all", or "newest" for checkpoints that a link names only; the paths.
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
find -H "${paths[@]}" \( -type f -o -type l \) -print0 | LC_ALL=C sort -z | while IFS= read -r -d '' file; do
    wanted "$file" "$which" || continue
    if [[ -L $file ]] && ! given "$file"; then
        printf 'link\t%s\t%s\0' "$(readlink -- "$file")" "$file"
    else
        size=$(stat -L -c %s -- "$file")
        # Of that many bytes, since a record may grow meanwhile.
        hash=$(head -c "$size" -- "$file" | sha256sum)
        printf '%s\t%s\t%s\0' "$size" "${hash%% *}" "$file"
    fi
done
