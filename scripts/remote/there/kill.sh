# shellcheck shell=bash
# End the training: it is asked to save, and after so many seconds (the argument) its session is killed.
# shellcheck source=scripts/remote/there/prelude.sh
: "${root:?}" "${session:?}"
enter
if ! running; then
    echo "no tmux session $session runs on $HOSTNAME"
    exit 0
fi
pid=$(cat .remote/launches/last/pid 2>/dev/null || true)
# Only a process of this root: the number may be another's by now.
if [[ -n $pid && /proc/$pid/cwd -ef . ]] && kill -TERM "$pid"; then
    echo "asked it to finish its step and save; waiting up to $1 s"
    for ((tenth = 0; tenth < $1 * 10; tenth++)); do
        if ! running; then
            echo "ended with exit code $(cat .remote/launches/last/code 2>/dev/null || echo unknown)"
            exit 0
        fi
        sleep 0.1
    done
    echo "it did not end in $1 s: its last checkpoint stands"
fi
tmux kill-session -t "=$session"
echo "killed tmux session $session"
