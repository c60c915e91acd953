# shellcheck shell=bash
# Show the session in this terminal; Ctrl-b d leaves it running.
# shellcheck source=scripts/remote/there/prelude.sh
: "${root:?}" "${session:?}"
enter
launch=$(last_launch || true)
alive "$launch" || fail "no training runs in $root: just train config=FILE starts one, just status tells of the last"
refuse_another "$launch"
exec tmux attach-session -t "=$session"
