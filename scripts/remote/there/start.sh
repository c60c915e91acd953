# shellcheck shell=bash
# Check a config and start its training in tmux; prints the run directory.
# Arguments: the tree of those who ask, in words; the command and its arguments.
# shellcheck source=scripts/remote/there/prelude.sh
: "${root:?}" "${session:?}"
enter
refuse_running
wanted=$1 command=$2
shift 2
[[ -x .venv/bin/$command ]] || fail "$root/.venv has no $command: run just build-remote"
have tmux || fail "tmux is not there: run just bootstrap-remote"
if [[ $(cat .remote/tree 2>/dev/null) != "$wanted" ]]; then
    echo "the tree on $HOSTNAME is not that from here ($wanted): just bootstrap-remote sends it" >&2
fi

settings=$(".venv/bin/$command" "$@" --print-config)
directory=$(.venv/bin/python -c 'import sys, tomllib; print(tomllib.load(sys.stdin.buffer)["run"]["directory"])' \
    <<<"$settings")
launch=$(mktemp -d ".remote/launches/$(date +%Y%m%d-%H%M%S)-XXX")
printf '%s\0' "$command" "$@" >"$launch/command"
printf '%s\n' "$directory" >"$launch/directory"
: >"$launch/log"
ln -sfn -- "${launch##*/}" .remote/launches/last
tmux new-session -d -s "$session" -c "$root" bash scripts/remote/there/run.sh "$launch"
printf '%s\n' "$directory"
