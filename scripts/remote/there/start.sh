# shellcheck shell=bash
# Check a config and start its training in tmux; prints the name of the launch and the run directory, a line each.
# Arguments: the tree of those who ask, in words; the command and its arguments.
# shellcheck source=scripts/remote/there/prelude.sh
: "${root:?}" "${session:?}"
enter
wanted=$1 command=$2
shift 2
[[ -x .venv/bin/$command ]] || fail "$root/.venv has no $command: run just build-remote"
have tmux || fail "tmux is not there: run just bootstrap-remote"

# One start after the other: what is found out here holds until the session is there.
exec 9>.remote/lock
flock 9
refuse_running
# The session of a run that just ended takes a moment to close.
begun_in() {
    tmux has-session -t "=$session" 2>/dev/null && tmux display-message -p -t "=$session:" '#{session_path}'
}
for _ in {1..20}; do
    begun=$(begun_in) && [[ $begun -ef . ]] || break
    sleep 0.1
done
! begun=$(begun_in) || fail "tmux session $session, begun in $begun, is there already and trains nothing of $root: \
REMOTE_SESSION=NAME trains in another"

is_there=$(cat .remote/tree 2>/dev/null || true)
if [[ ${is_there##*(contents } != "${wanted##*(contents }" ]]; then
    echo "the tree on $HOSTNAME is not that from here ($wanted): just bootstrap-remote sends it" >&2
fi
settings=$(.venv/bin/python -I scripts/remote/environment.py ".venv/bin/$command" "$@" --print-config)
directory=$(.venv/bin/python -c 'import sys, tomllib
print(tomllib.load(sys.stdin.buffer).get("run", {}).get("directory", ""))' <<<"$settings")
[[ -n $directory ]] || fail "command = $command has no run.directory, so it is no training: just infer executes it"

launch=$(mktemp -d ".remote/launches/$(date +%Y%m%d-%H%M%S)-XXX")
printf '%s\0' "$command" "$@" >"$launch/command"
printf '%s\n' "$directory" >"$launch/directory"
printf '%s\n' "$session" >"$launch/session"
: >"$launch/log"
if ! said=$(tmux new-session -d -s "$session" -c "$root" \
    env "$(mark_of "$launch")" bash scripts/remote/there/run.sh "$launch" 2>&1 9>&-); then
    rm -rf -- "$launch"
    fail "tmux session $session cannot begin: $said"
fi
ln -sfn -- "${launch##*/}" .remote/launches/next
mv -T -- .remote/launches/next .remote/launches/last
for _ in {1..100}; do
    [[ ! -s $launch/shell ]] || break
    sleep 0.1
done
[[ -s $launch/shell ]] || fail "tmux session $session did not begin in 10 s: just status tells what became of it"
printf '%s\n' "${launch##*/}" "$directory"
