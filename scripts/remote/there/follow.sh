# shellcheck shell=bash
# The output of the last launch until it ends. Argument: the bytes of it that were seen before.
# shellcheck source=scripts/remote/there/prelude.sh
: "${root:?}" "${session:?}"
enter
launch=.remote/launches/$(readlink .remote/launches/last) || fail "nothing was trained in $root yet: just train config=FILE"
for _ in {1..50}; do
    [[ ! -e $launch/shell ]] || break
    sleep 0.2
done
[[ -e $launch/shell ]] || fail "the tmux session $session did not begin: just train again"
if [[ -e $launch/code ]] || ! kill -0 "$(<"$launch/shell")" 2>/dev/null; then
    exec tail -c "+$(($1 + 1))" "$launch/log"
fi
exec tail -c "+$(($1 + 1))" -s 0.3 --pid "$(<"$launch/shell")" -f "$launch/log"
