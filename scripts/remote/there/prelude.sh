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

# The folder of the last launch of this root. Fails where nothing was trained yet.
last_launch() {
    local name
    name=$(readlink .remote/launches/last) && printf '.remote/launches/%s\n' "$name"
}

# What stands in the environment of every process of a launch, whatever its group or terminal, and of no other.
mark_of() {
    printf 'DIFFUSIONLM_LAUNCH=%s/%s\n' "$(pwd -P)" "$1"
}

# Whether a launch runs: its shell (run.sh) does, and that number is not another's by now.
alive() {
    [[ -n $1 && -s $1/shell ]] && grep -qszxF -- "$(mark_of "$1")" "/proc/$(<"$1/shell")/environ"
}

# For what would disturb a run that goes on in this root.
refuse_running() {
    local launch
    launch=$(last_launch) || return 0
    ! alive "$launch" || fail "tmux session $(<"$launch/session") runs already: just attach-train or just \
follow-train shows it, just kill-train ends it, REMOTE_SESSION=NAME with another REMOTE_ROOT trains beside it"
}

# For what is meant for the session that was named, and no other.
refuse_another() {
    local its
    its=$(<"$1/session")
    [[ $its == "$session" ]] || fail "the training of $root runs in tmux session $its, not in $session: \
set REMOTE_SESSION=$its"
}
