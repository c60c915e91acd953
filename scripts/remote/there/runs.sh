# shellcheck shell=bash
# Of each run: its folder, when it was last written (Unix seconds), its newest checkpoint, the end of its metrics and its
# summary, each ended by a NUL.
# shellcheck source=scripts/remote/there/prelude.sh
: "${root:?}" "${session:?}"
enter
find runs -name checkpoints -prune -o -name metrics.jsonl -type f -print0 | LC_ALL=C sort -z |
    while IFS= read -r -d '' metrics; do
        folder=${metrics%/*}
        printf '%s\0' "$folder" "$(stat -c %Y -- "$metrics")" \
            "$(readlink -- "$folder/checkpoints/latest" || true)" "$(tail -n 100 -- "$metrics")" \
            "$(cat -- "$folder/summary.json" 2>/dev/null || true)"
    done
