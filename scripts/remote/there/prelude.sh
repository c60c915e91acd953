# shellcheck shell=bash
# What every script on the remote machine begins with. Its first arguments are the root and the tmux session.
set -euo pipefail

root=$1
session=$2
shift 2
[[ $root == /* ]] || root=$HOME/$root
PATH=$root/.tools/bin:$root/.tools/uv/bin:$HOME/.local/bin:$HOME/.cargo/bin:$PATH
unset VIRTUAL_ENV

fail() {
    printf '%s: %s\n' "$HOSTNAME" "$1" >&2
    exit 2
}

have() {
    command -v "$1" >/dev/null 2>&1
}

# Go to the root, if it is one.
enter() {
    [[ -d $root/.remote ]] ||
        fail "$root was not made by just bootstrap-remote: run it, or set REMOTE_ROOT to where it was made"
    cd -- "$root"
}

running() {
    have tmux && tmux has-session -t "=$session" 2>/dev/null
}

# For what would disturb a run that goes on.
refuse_running() {
    ! running || fail "tmux session $session runs already: just attach-train or just follow-train shows it, \
just kill-train ends it, REMOTE_SESSION=NAME with another REMOTE_ROOT trains beside it"
}

# The settings of env/*.env, for what is started from here; they are in no command line.
source_env() {
    local file
    for file in env/*.env; do
        if [[ -f $file ]]; then
            set -a
            # shellcheck source=/dev/null
            source "$file"
            set +a
        fi
    done
}
