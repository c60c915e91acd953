# shellcheck shell=bash
# Execute a command of the project in the root, with the settings of env/. Arguments: the command and its arguments.
# shellcheck source=scripts/remote/there/prelude.sh
: "${root:?}" "${session:?}"
enter
[[ -d .venv ]] || fail "$root has no .venv: run just build-remote"
command=.venv/bin/$1
if [[ $1 == */* || ! -x $command ]]; then
    known=(.venv/bin/diffusionlm-*)
    fail "command = $1 is not one of the project: ${known[*]##*/}"
fi
shift
exec .venv/bin/python -I scripts/remote/environment.py "$command" "$@"
