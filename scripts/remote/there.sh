#!/usr/bin/env bash
# What runs on the remote machine: there.sh ROOT SESSION ACTION [ARGUMENT ...] calls the function of that name in the root.
# The text of this file is sent with every call, so an old copy is never used.
# shellcheck disable=SC2329
set -euo pipefail

root=$1 session=$2 action=$3
shift 3
[[ $root == /* ]] || root=$HOME/$root
PATH=$root/.tools/bin:$root/.tools/uv/bin:$HOME/.local/bin:$HOME/.cargo/bin:$PATH
unset VIRTUAL_ENV

fail() {
    printf '%s: %s\n' "$HOSTNAME" "$1" >&2
    exit 2
}

have() { command -v "$1" >/dev/null 2>&1; }

# --- installation

install_uv() {
    echo "uv is not there: installing it into $root/.tools"
    { have python3 && python3 -m pip install --quiet --upgrade --target .tools/uv uv; } ||
        { have curl && curl -LsSf https://astral.sh/uv/install.sh | UV_UNMANAGED_INSTALL=$root/.tools/bin sh; } ||
        fail "uv cannot be installed: python3 -m pip install --user uv must work there, or https://astral.sh be reached"
}

install_package() {
    local manager command as_root=()
    for manager in apt-get dnf yum zypper apk pacman none; do ! have "$manager" || break; done
    command=("$manager" install -y "$1")
    case $manager in
    none) fail "$1 is not there, and no package manager that is known: install it" ;;
    apk) command=(apk add "$1") ;;
    pacman) command=(pacman -S --noconfirm "$1") ;;
    esac
    [[ $EUID -eq 0 ]] || as_root=(sudo -n)
    echo "$1 is not there: ${command[*]}"
    [[ $manager != apt-get ]] || "${as_root[@]}" apt-get update -qq >&2 || true
    { "${as_root[@]}" "${command[@]}" >&2 && have "$1"; } ||
        fail "$1 cannot be installed from here: on that machine, run: sudo ${command[*]}"
}

# Create the root and its folders, and install missing tools.
bootstrap() {
    local tool message
    for tool in find stat tail grep flock; do have "$tool" || fail "$tool is not there: install it"; done
    [[ ! -e $root || -d $root ]] || fail "REMOTE_ROOT = $root is a file: name a directory"
    message=$(mkdir -p -- "$root" 2>&1) ||
        fail "REMOTE_ROOT = $root cannot be made: name a directory that may be written (${message##*: })"
    cd -- "$root"
    [[ -d .remote || -z $(ls -A) ]] || fail "REMOTE_ROOT = $root holds other files: name a new or empty directory"
    message=$(mkdir -p .remote/launches .tools/bin data runs env 2>&1) ||
        fail "REMOTE_ROOT = $root cannot be written: ${message%%$'\n'*}"
    have uv || install_uv
    for tool in tmux rsync; do have "$tool" || install_package "$tool"; done
    echo "$root: $(uv --version), $(tmux -V)"
}

build() {
    refuse_running
    [[ -f pyproject.toml ]] || fail "$root has no tree: run just bootstrap-remote"
    have uv || fail "uv is not there: run just bootstrap-remote"
    uv sync --no-dev "$@"
}

# --- transfers

require_rsync() {
    have rsync || fail "rsync is not there: just bootstrap-remote installs it, or sudo apt-get install rsync"
}

# Make a folder (the root, if empty) ready for a copy.
prepare() {
    local message
    require_rsync
    message=$(mkdir -p -- "${1:-.}" 2>&1) || fail "$root/$1 cannot be made (${message##*: }): move away what is in its place"
}

# The remote end of a copy from or to a folder. What it replaces is moved to .remote/replaced/.new.
serve() {
    local replaced=$PWD/.remote/replaced/.new/$1 options=()
    # Since 3.5 rsync follows a link to a folder of another disk only with this option.
    [[ $(rsync --help </dev/null) != *--insecure-links* ]] || options=(--insecure-links)
    cd -- "${1:-.}"
    exec rsync "${options[@]}" --backup-dir="$replaced" "${@:2}"
}

# Keep the files that copies have replaced, but no links, and list them.
keep_replaced() {
    local kept names=() listed more=''
    [[ -d .remote/replaced/.new ]] || return 0
    find .remote/replaced/.new -type l -delete
    find .remote/replaced/.new -depth -type d -empty -delete
    [[ -d .remote/replaced/.new ]] || return 0
    kept=.remote/replaced/$(date +%Y%m%d-%H%M%S)-$$
    find .remote/replaced/.new -type f -exec chmod 600 {} +
    mv -T -- .remote/replaced/.new "$kept"
    mapfile -d '' -t names < <(find "$kept" -type f -printf '%P\0' | LC_ALL=C sort -z)
    [[ ${#names[@]} -le 5 ]] || more=" and $((${#names[@]} - 5)) more"
    printf -v listed '%q, ' "${names[@]:0:5}"
    echo "replaced on $HOSTNAME, kept in $root/$kept: ${listed%, }$more" >&2
}

# Move away the tracked files that were sent once and are no longer tracked. Standard input: the tracked files, NUL between.
stage() {
    local path replaced=.remote/replaced/.new
    export LC_ALL=C
    refuse_running
    rm -f .remote/tree # what is there is no whole tree until `install`
    sort -z >.remote/files.new
    touch .remote/files
    while IFS= read -r -d '' path; do
        [[ -f $path || -L $path ]] || continue
        mkdir -p -- "$(dirname -- "$replaced/$path")"
        mv -fT -- "$path" "$replaced/$path"
    done < <(comm -z -13 .remote/files.new .remote/files)
    mv -- .remote/files.new .remote/files
}

# Note that the tree is complete. Argument: its description.
install() { printf '%s\n' "$1" >.remote/tree; }

# What is at a path: "folder" and the checkpoints that its links name, "file" or "nothing", each ended by a NUL.
find_path() {
    require_rsync
    if [[ -d $1 ]]; then
        printf 'folder\0'
        [[ ! -d $1/checkpoints ]] || (cd -- "$1" && find checkpoints -maxdepth 1 -type l -printf '%l\0')
    elif [[ -e $1 ]]; then
        printf 'file\0'
    else
        printf 'nothing\0'
    fi
}

# The root from /, which need not be there yet.
root() { printf '%s' "$root"; }

# --- training

# The folder of the last launch of this root; empty where nothing was trained yet.
last_launch() {
    local name
    name=$(readlink .remote/launches/last) || return 0
    echo ".remote/launches/$name"
}

# What stands in the environment of every process of a launch, whatever its group or terminal, and of no other.
mark_of() { printf 'DIFFUSIONLM_LAUNCH=%s/%s\n' "$(pwd -P)" "$1"; }

# Whether a launch runs: its shell does, and that number is not another's by now.
alive() { [[ -n $1 && -s $1/shell ]] && grep -qszxF -- "$(mark_of "$1")" "/proc/$(<"$1/shell")/environ"; }

# For what would disturb a run that goes on in this root.
refuse_running() {
    local launch
    launch=$(last_launch)
    ! alive "$launch" || fail "tmux session $(<"$launch/session") runs already: just attach-train or just \
follow-train shows it, just kill-train ends it, REMOTE_SESSION=NAME with another REMOTE_ROOT trains beside it"
}

# For what is meant for the session that was named, and no other.
refuse_another() {
    local its
    its=$(<"$1/session")
    [[ $its == "$session" ]] ||
        fail "the training of $root runs in tmux session $its, not in $session: set REMOTE_SESSION=$its"
}

# The run directory of a training command, whose config is checked.
run_directory() {
    local settings directory
    settings=$(execute "$@" --print-config) || exit
    directory=$(.venv/bin/python -c 'import sys, tomllib
print(tomllib.load(sys.stdin.buffer).get("run", {}).get("directory", ""))' <<<"$settings")
    [[ -n $directory ]] || fail "command = $1 has no run.directory, so it is no training: just infer executes it"
    printf '%s' "$directory"
}

# Check a config and start its training in tmux; prints the name of the launch and the run directory, a line each.
# Arguments: the description of the sender's tree; the command and its arguments.
start() {
    local tree=$1 program=$2 tenth folder sent_tree directory launch message
    shift 2
    have tmux || fail "tmux is not there: run just bootstrap-remote"
    # One start after the other: what is found out here holds until the session is there.
    exec 9>.remote/lock
    flock 9
    refuse_running
    for tenth in {1..20}; do # the session of a run that just ended takes a moment to close
        tmux has-session -t "=$session" 2>/dev/null || break
        folder=$(tmux display-message -p -t "=$session:" '#{session_path}' || true)
        [[ $folder -ef . && $tenth -lt 20 ]] || fail "tmux session $session, begun in $folder, is there already and trains \
nothing of $root: REMOTE_SESSION=NAME trains in another"
        sleep 0.1
    done
    sent_tree=$(cat .remote/tree 2>/dev/null || true)
    [[ $sent_tree == "$tree" ]] ||
        echo "the tree on $HOSTNAME is not that from here ($tree): just bootstrap-remote sends it" >&2
    directory=$(run_directory "$program" "$@")

    launch=$(mktemp -d ".remote/launches/$(date +%Y%m%d-%H%M%S)-XXX")
    printf '%s\0' "$program" "$@" >"$launch/command"
    printf '%s\n' "$directory" >"$launch/directory"
    printf '%s\n' "$session" >"$launch/session"
    : >"$launch/log"
    if ! message=$(tmux new-session -d -s "$session" -c "$root" env "$(mark_of "$launch")" \
        bash scripts/remote/there.sh "$root" "$session" run "$launch" 2>&1 9>&-); then
        rm -rf -- "$launch"
        fail "tmux session $session cannot begin: $message"
    fi
    ln -sfn -- "${launch##*/}" .remote/launches/next
    mv -T -- .remote/launches/next .remote/launches/last
    for _ in {1..100}; do
        [[ ! -s $launch/shell ]] || break
        sleep 0.1
    done
    [[ -s $launch/shell ]] || fail "tmux session $session did not begin in 10 s: just status tells what became of it"
    printf '%s\n' "${launch##*/}" "$directory"
}

# What the tmux session executes: the training of a launch, with its output in `log` and its exit code in `code`.
run() {
    local launch=$1 command code=0
    echo $$ >"$launch/shell"
    mapfile -d '' -t command <"$launch/command"
    # A signal is for the training, which saves first: the shell and tee wait for it.
    trap : INT TERM HUP
    # Of a disk that is full tee complains; how the training ends counts all the same.
    {
        (
            trap - INT TERM HUP
            echo "$BASHPID" >"$launch/pid"
            execute "${command[@]}"
        ) 2>&1 || code=$?
        echo "$code" >"$launch/code.part"
    } | tee -i "$launch/log" || true
    mv -- "$launch/code.part" "$launch/code"
}

# Execute a command of the project with the settings of env/.
execute() {
    local programs
    [[ -d .venv ]] || fail "$root has no .venv: run just build-remote"
    if [[ $1 == */* || ! -x .venv/bin/$1 ]]; then
        programs=(.venv/bin/diffusionlm-*)
        fail "command = $1 is not one of the project: ${programs[*]##*/}"
    fi
    exec .venv/bin/python -I scripts/remote/environment.py ".venv/bin/$1" "${@:2}"
}

# Of a launch (default: the last) its name, exit code (empty where it has none) and run directory, a line each.
ended() {
    local launch=.remote/launches/$1
    [[ -n $1 ]] || launch=$(last_launch)
    [[ -n $launch ]] || fail "nothing was trained in $root yet: just train config=FILE"
    [[ -d $launch ]] || fail "$root has no launch $1 any more"
    printf '%s\n' "${launch##*/}" "$(cat "$launch/code" 2>/dev/null)" "$(<"$launch/directory")"
}

# The output of a launch until it ends. Arguments: its name, the bytes of it that were seen before.
follow() {
    local launch=.remote/launches/$1 running=()
    [[ -f $launch/log ]] || fail "$root has no launch $1 any more"
    ! alive "$launch" || running=(-s 0.3 --pid "$(<"$launch/shell")" -f)
    exec tail -c "+$(($2 + 1))" "${running[@]}" "$launch/log"
}

# Show the session in this terminal; Ctrl-b d leaves it running.
attach() {
    local launch
    launch=$(last_launch)
    alive "$launch" || fail "no training runs in $root: just train config=FILE starts one, just status tells of the last"
    refuse_another "$launch"
    exec tmux attach-session -t "=$session"
}

# End the training of this root: it is asked to save, and after so many seconds its processes are killed.
stop() {
    local launch mark pid tenth asked='' left
    launch=$(last_launch)
    if ! alive "$launch"; then
        echo "no training runs in $root on $HOSTNAME"
        return 0
    fi
    refuse_another "$launch"
    for ((tenth = 0; tenth <= $1 * 10; tenth++)); do
        if ! alive "$launch"; then
            echo "ended with exit code $(cat "$launch/code" 2>/dev/null || echo unknown)"
            return 0
        fi
        if [[ -z $asked ]] && pid=$(cat "$launch/pid" 2>/dev/null) && [[ -n $pid && /proc/$pid/cwd -ef . ]] &&
            kill -TERM "$pid"; then
            asked=yes
            echo "asked it to finish its step and save; waiting up to $1 s"
        fi
        sleep 0.1
    done
    echo "it did not end in $1 s: its last checkpoint stands"
    # tmux would only tell its shell, and ranks and workers may have groups and sessions of their own. Again until there
    # are none, since one may start another meanwhile.
    mark=$(mark_of "$launch")
    for _ in {1..50}; do
        mapfile -t left < <(grep -lszxF -- "$mark" /proc/[0-9]*/environ)
        if [[ ${#left[@]} -eq 0 ]]; then
            echo "killed the training in tmux session $session"
            return 0
        fi
        left=("${left[@]#/proc/}")
        kill -KILL "${left[@]%/environ}" 2>/dev/null || true
        sleep 0.1
    done
    fail "these processes of the training were killed and do not end: ${left[*]%/environ}"
}

# --- what is there

# A table of the runs: the last step and loss of their metrics, the bound of their summary, their newest checkpoint.
runs() {
    local metrics folder step loss bound layout='%-32s  %8s  %-8.8s  %-8.8s  %-17s  %s\n'
    numbers() { grep -o "\"$1\": [0-9][0-9.e+-]*" | cut -d ' ' -f 2; } # behind a key, in lines of JSON
    # shellcheck disable=SC2059
    printf "$layout" run step loss bound 'newest checkpoint' written
    find runs -name checkpoints -prune -o -name metrics.jsonl -type f -print0 | LC_ALL=C sort -z |
        while IFS= read -r -d '' metrics; do
            folder=${metrics%/*}
            step=$(tail -n 100 -- "$metrics" | numbers step | tail -n 1) || step=-
            loss=$(tail -n 100 -- "$metrics" | numbers loss | tail -n 1) || loss=-
            bound=$(numbers nats_per_token 2>/dev/null <"$folder/summary.json" | head -n 1) || bound=-
            # shellcheck disable=SC2059
            printf "$layout" "$folder" "$step" "$loss" "$bound" "$(readlink -- "$folder/checkpoints/latest" || echo -)" \
                "$(date -r "$metrics" '+%Y-%m-%d %H:%M')"
        done
}

nvitop() {
    have nvidia-smi || fail "nvidia-smi is not there, so there is no NVIDIA GPU to watch: just status shows the machine"
    exec uv tool run nvitop "$@"
}

version() { if have "$1"; then "$@"; else echo "$1 is not there: run just bootstrap-remote"; fi; }

status() {
    local gpus built='not yet: run just build-remote' settings launch command shown state=''
    gpus=$(nvidia-smi --query-gpu=name,memory.used,memory.total,utilization.gpu --format=csv,noheader 2>/dev/null) && [[ -n $gpus ]] ||
        gpus='none: with run.device = "auto" it trains on the CPU'
    [[ ! -x .venv/bin/diffusionlm-train ]] || built=$(.venv/bin/python --version)
    settings=$(find env -maxdepth 1 -name '*.env' -type f | LC_ALL=C sort | tr '\n' ' ')
    launch=$(last_launch)
    ! alive "$launch" || state="$(<"$launch/session") runs"
    printf '%-10s%s\n' machine "$HOSTNAME, $(nproc) cores" \
        root "$root, $(df -h --output=avail . | tail -n 1 | tr -d ' ') free" \
        tree "$(cat .remote/tree 2>/dev/null || echo 'not sent yet: run just bootstrap-remote')" \
        tools "$(version uv --version), $(version tmux -V)" built "$built" \
        GPU "${gpus//$'\n'/$'\n'          }" \
        env "${settings:-no settings: just sync-env sends env/*.env}" session "${state:-$session does not run}"
    [[ -n $launch ]] || return 0
    mapfile -d '' -t command <"$launch/command"
    printf -v shown '%q ' "${command[@]}"
    [[ -z $state ]] || state='goes on'
    [[ ! -e $launch/code ]] || state="ended with exit code $(<"$launch/code")"
    printf '%-10s%s\n' 'last run' "$shown" '' "${state:-ended without an exit code: killed, or the machine went down}" \
        '' "$(tail -n 1 "$launch/log")"
}

if [[ $action == find_path && ! -d $root ]]; then
    printf 'nothing\0'
    exit
elif [[ $action != bootstrap ]]; then
    [[ -d $root/.remote ]] ||
        fail "$root was not made by just bootstrap-remote: run it, or set REMOTE_ROOT to where it was made"
    cd -- "$root"
fi
"$action" "$@"
