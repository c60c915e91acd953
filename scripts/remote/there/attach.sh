# shellcheck shell=bash
# Show the session in this terminal; Ctrl-b d leaves it running.
# shellcheck source=scripts/remote/there/prelude.sh
: "${root:?}" "${session:?}"
running || fail "no tmux session $session runs: just train config=FILE starts one, just status tells of the last"
exec tmux attach-session -t "=$session"
