# shellcheck shell=bash
# Install what the project needs into .venv. Arguments go to uv sync.
# shellcheck source=scripts/remote/there/prelude.sh
: "${root:?}" "${session:?}"
enter
refuse_running
[[ -f pyproject.toml ]] || fail "$root has no tree: run just bootstrap-remote"
have uv || fail "uv is not there: run just bootstrap-remote"
uv sync --no-dev "$@"
