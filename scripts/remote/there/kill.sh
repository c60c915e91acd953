# shellcheck shell=bash
# End the training of this root: it is asked to save, and after so many seconds (the argument) its processes are killed.
# shellcheck source=scripts/remote/there/prelude.sh
: "${root:?}" "${session:?}"
enter
launch=$(last_launch || true)
if ! alive "$launch"; then
    echo "no training runs in $root on $HOSTNAME"
    exit 0
fi
refuse_another "$launch"

asked=
for ((tenth = 0; tenth <= $1 * 10; tenth++)); do
    if ! alive "$launch"; then
        echo "ended with exit code $(cat "$launch/code" 2>/dev/null || echo unknown)"
        exit 0
    fi
    if [[ -z $asked ]] && pid=$(cat "$launch/pid" 2>/dev/null) && [[ -n $pid && /proc/$pid/cwd -ef . ]] &&
        kill -TERM "$pid"; then
        asked=yes
        echo "asked it to finish its step and save; waiting up to $1 s"
    fi
    sleep 0.1
done
echo "it did not end in $1 s: its last checkpoint stands"

# tmux would only tell run.sh, and ranks and workers may have groups and sessions of their own. Again until there are
# none, since one may start another meanwhile.
mark=$(mark_of "$launch")
for _ in {1..50}; do
    mapfile -t left < <(grep -lszxF -- "$mark" /proc/[0-9]*/environ)
    if [[ ${#left[@]} -eq 0 ]]; then
        echo "killed the training in tmux session $session"
        exit 0
    fi
    left=("${left[@]#/proc/}")
    kill -KILL "${left[@]%/environ}" 2>/dev/null || true
    sleep 0.1
done
printf '%s: these processes of the training were killed and do not end: %s\n' "$HOSTNAME" "${left[*]%/environ}" >&2
exit 1
