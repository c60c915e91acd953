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
    for tool in tar sha256sum find stat tail grep flock; do have "$tool" || fail "$tool is not there: install it"; done
    [[ ! -e $root || -d $root ]] || fail "REMOTE_ROOT = $root is a file: name a directory"
    message=$(mkdir -p -- "$root" 2>&1) ||
        fail "REMOTE_ROOT = $root cannot be made: name a directory that may be written (${message##*: })"
    cd -- "$root"
    [[ -d .remote || -z $(ls -A) ]] || fail "REMOTE_ROOT = $root holds other files: name a new or empty directory"
    message=$(mkdir -p .remote/launches .tools/bin data runs env 2>&1) ||
        fail "REMOTE_ROOT = $root cannot be written: ${message%%$'\n'*}"
    have uv || install_uv
    if ! have just; then
        echo "just is not there: installing it into $root/.tools"
        UV_TOOL_DIR=$root/.tools/tools UV_TOOL_BIN_DIR=$root/.tools/bin uv tool install --quiet rust-just ||
            fail "just cannot be installed: uv tool install rust-just fails there"
    fi
    have tmux || install_package tmux
    echo "$root: $(uv --version), $(just --version), $(tmux -V)"
}

build() {
    refuse_running
    [[ -f pyproject.toml ]] || fail "$root has no tree: run just bootstrap-remote"
    have uv || fail "uv is not there: run just bootstrap-remote"
    uv sync --no-dev "$@"
}

# --- transfers

# Put the tracked files, which come as a tar on standard input, into the root. All are checked aside before one is
# changed. Argument: what the tree is, in words.
install() {
    refuse_running
    export LC_ALL=C

    stage=.remote/incoming
    rm -rf -- "$stage"
    mkdir -m 700 -- "$stage"
    give_up() {
        rm -rf -- "$stage"
        fail "$1: nothing was changed"
    }
    # Of many complaints, as of a full disk, the first tells all.
    said=$(tar --extract --gzip --no-same-owner --directory "$stage" --file - 2>&1) ||
        give_up "the tree did not come whole (${said%%$'\n'*})"
    # The manifest comes last, so that a stream that was cut has none.
    if [[ ! -f $stage/manifest ]] || ! (cd "$stage/tree" && sha256sum --check --status --strict ../manifest); then
        give_up "the tree did not come whole, run the same again"
    fi

    # What comes; what came before, and comes no more; the SHA-256 of all that ever came.
    (cd "$stage/tree" && find . ! -type d -printf '%P\n') | sort >"$stage/new"
    touch .remote/manifest .remote/sent
    cut -c 67- .remote/manifest | sort | comm -23 - "$stage/new" >"$stage/gone"
    cut -c -64 .remote/manifest | sort -u - .remote/sent >"$stage/sent"

    in_the_way() {
        local path
        while IFS= read -r path; do
            [[ -d $path || (! -e $path && ! -L $path) ]] || printf '%s\n' "$path"
        done < <(cd "$stage/tree" && find . -mindepth 1 -type d -printf '%P\n')
        while IFS= read -r path; do
            [[ ! -d $path || -L $path ]] || find "./$path" ! -type d -printf '%p\n' | cut -c 3-
        done <"$stage/new"
    }
    other=$(in_the_way | sort | comm -23 - "$stage/gone" | sed -n 1p)
    [[ -z $other ]] || give_up "$root/$other is in the way of the tree, where a file is a folder or a folder a file: move it away"

    # What was edited here, and so never came from there, is kept before it is overwritten.
    edited=.remote/edited/$(date +%Y%m%d-%H%M%S)
    cat "$stage/new" "$stage/gone" | while IFS= read -r path; do
        [[ ! -f $path || -L $path ]] || printf '%s\0' "$path"
    done | xargs -0 -r sha256sum -- | sort | comm -23 - <(sort "$stage/manifest") |
        { grep -vFf "$stage/sent" || true; } | cut -c 67- >"$stage/edited"
    while IFS= read -r path; do
        (umask 077 && mkdir -p -- "$edited/$(dirname -- "$path")")
        cp -- "$path" "$edited/$path" 2>/dev/null || give_up "$root/$path was edited there and cannot be kept"
        chmod 600 -- "$edited/$path"
    done <"$stage/edited"
    if [[ -s $stage/edited ]]; then
        mapfile -t names <"$stage/edited"
        printf -v listed '%s, ' "${names[@]:0:5}"
        more=
        [[ ${#names[@]} -le 5 ]] || more=" and $((${#names[@]} - 5)) more"
        echo "edited on $HOSTNAME, kept in $root/$edited: ${listed%, }$more"
    fi

    cut -c -64 "$stage/manifest" | sort -u - "$stage/sent" >.remote/sent.part
    chmod 600 .remote/sent.part # of secrets too
    mv -- .remote/sent.part .remote/sent
    while IFS= read -r path; do
        rm -f -- "$path"
    done <"$stage/gone"
    while IFS= read -r path; do
        # What it held comes no more.
        [[ ! -d $path || -L $path ]] || find "./$path" -depth -type d -delete
    done <"$stage/new"
    (cd "$stage/tree" && find . -type d -printf '%P\0') | while IFS= read -r -d '' folder; do
        mkdir -p -- "./$folder" 2>/dev/null || fail "$root/$folder cannot be made: see to that, and run the same again"
        find "$stage/tree/$folder" -mindepth 1 -maxdepth 1 ! -type d -exec mv -f -t "./$folder" -- {} +
    done
    mv -- "$stage/manifest" .remote/manifest
    printf '%s\n' "$1" >.remote/tree
    rm -rf -- "$stage"
}

# Make a link. Arguments: its path, its target.
make_link() {
    [[ -L $1 || ! -e $1 ]] || fail "$root/$1 is a file or folder there and a link here: move it away"
    mkdir -p -- "$(dirname -- "$1")"
    ln -sfnT -- "$2" "$1"
}

# The files of files or folders under the root: size, SHA-256 and path, or the target of a link, each ended by a NUL.
# Nothing of what is not there, or goes meanwhile, as checkpoints of a run do. Arguments: "all", or "newest" for checkpoints that a link names only; the paths.
list() {
    which=$1
    shift
    paths=()
    for path in "$@"; do
        [[ ! -e $path ]] || paths+=("$path")
    done
    [[ ${#paths[@]} -gt 0 ]] || exit 0

    wanted() {
        local folder name link
        [[ $1 != .lock && $1 != */.lock ]] || return 1
        # What a run writes aside, and renames.
        [[ ! $1 =~ (^|/)[^/]*\.tmp-(old|[0-9a-f]{8})(/|$) ]] || return 1
        [[ $2 == newest && $1 == */checkpoints/*/* ]] || return 0
        folder=${1%%/checkpoints/*}/checkpoints
        name=${1#"$folder"/}
        for link in "$folder"/*; do
            if [[ -L $link && $(readlink -- "$link") == "${name%%/*}" ]]; then
                return 0
            fi
        done
        return 1
    }

    given() {
        local path
        for path in "${paths[@]}"; do
            [[ $path != "$1" ]] || return 0
        done
        return 1
    }

    # What was asked for by the name of a link is what it names.
    find -H "${paths[@]}" -ignore_readdir_race \( -type f -o -type l \) -print0 | LC_ALL=C sort -z | {
        links=()
        while IFS= read -r -d '' file; do
            wanted "$file" "$which" || continue
            if [[ -L $file ]] && ! given "$file"; then
                links+=("$file")
            # Of that many bytes, since a record may grow meanwhile.
            elif size=$(stat -L -c %s -- "$file" 2>/dev/null) && hash=$(head -c "$size" -- "$file" 2>/dev/null | sha256sum); then
                printf '%s\t%s\t%s\0' "$size" "${hash%% *}" "$file"
            elif [[ -e $file ]]; then
                fail "$file cannot be read"
            fi
        done
        # As they are now: what they name did not go before it was listed.
        for file in "${links[@]}"; do
            ! target=$(readlink -- "$file") || printf 'link\t%s\t%s\0' "$target" "$file"
        done
    }
}

# Bytes of a file, to standard output; exit code 3 where it is gone. Arguments: the path, the first byte, how many.
read_bytes() {
    [[ -e $1 ]] || exit 3
    # tail ends by a broken pipe when head has enough.
    { tail -c "+$(($2 + 1))" -- "$1" || true; } | head -c "$3"
}

# Write a file, which gets its name once it is whole. Standard input is the SHA-256 of the whole in a line, and bytes.
# Arguments: the path, the bytes of the unfinished part that stay, the bytes of the whole, the mode.
write_file() {
    path=$1 kept=$2 size=$3 mode=$4
    IFS= read -r hash || fail "$root/$path did not come whole"
    digits=${hash:0:12}
    [[ $mode != 600 ]] || digits=000000000000 # of a secret, none is in a name
    part=$path.$digits.part

    [[ ! -d $path ]] || fail "$root/$path is a folder there and a file here: move it away"
    umask 077
    (umask 022 && mkdir -p -- "$(dirname -- "$path")")
    exec 9>>"$part"
    if ! flock -n 9; then
        # Another send; or one whose connection was lost, which gets no more bytes.
        before=$(stat -c %s -- "$part" 2>/dev/null || true)
        sleep 1
        [[ $(stat -c %s -- "$part" 2>/dev/null || true) == "$before" ]] ||
            fail "$root/$path is sent by another just now: wait for that, and run the same again"
    fi
    [[ $part -ef /proc/$$/fd/9 ]] || fail "$root/$path was sent by another just now: run the same again"
    truncate -s "$kept" -- "$part"
    cat >&9 2>/dev/null || fail "$root/$path cannot be written: $(df -h --output=avail . | tail -n 1 | tr -d ' ') are free there"
    found=$(sha256sum <"$part")
    if [[ ${found%% *} != "$hash" ]]; then
        # A shorter part is what the same command goes on with.
        [[ $(stat -c %s -- "$part") -lt $size ]] || rm -f -- "$part"
        fail "$root/$path did not come whole: run the same again"
    fi

    if [[ -f $path ]]; then
        # What was edited here, and so never came from there, is kept; no SHA-256 is in a command line.
        found=$(sha256sum <"$path")
        if [[ ${found%% *} != "$hash" ]] && ! grep -qxF -f <(printf '%s\n' "${found%% *}") \
            <(cat .remote/sent 2>/dev/null; cut -c -64 .remote/manifest 2>/dev/null); then
            edited=.remote/edited/$(date +%Y%m%d-%H%M%S)
            mkdir -p -- "$edited/$(dirname -- "$path")"
            cp -- "$path" "$edited/$path" || fail "$root/$path was edited there and cannot be kept: it is not replaced"
            chmod 600 -- "$edited/$path"
            echo "edited on $HOSTNAME, kept as $root/$edited/$path" >&2
        fi
    fi
    grep -qsxF -f <(printf '%s\n' "$hash") .remote/sent || printf '%s\n' "$hash" >>.remote/sent
    chmod "$mode" -- "$part"
    mv -fT -- "$part" "$path"
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

# Check a config and start its training in tmux; prints the name of the launch and the run directory, a line each.
# Arguments: the description of the sender's tree; the command and its arguments.
start() {
    local tree=$1 program=$2 tenth folder sent_tree settings directory launch message
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
    [[ ${sent_tree##*(contents } == "${tree##*(contents }" ]] ||
        echo "the tree on $HOSTNAME is not that from here ($tree): just bootstrap-remote sends it" >&2
    settings=$(execute "$program" "$@" --print-config)
    directory=$(.venv/bin/python -c 'import sys, tomllib
print(tomllib.load(sys.stdin.buffer).get("run", {}).get("directory", ""))' <<<"$settings")
    [[ -n $directory ]] || fail "command = $program has no run.directory, so it is no training: just infer executes it"

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

# Of each run: its folder, when it was last written (Unix seconds), its newest checkpoint, the end of its metrics and its
# summary, each ended by a NUL.
runs() {
    local metrics folder
    find runs -name checkpoints -prune -o -name metrics.jsonl -type f -print0 | LC_ALL=C sort -z |
        while IFS= read -r -d '' metrics; do
            folder=${metrics%/*}
            printf '%s\0' "$folder" "$(stat -c %Y -- "$metrics")" \
                "$(readlink -- "$folder/checkpoints/latest" || true)" "$(tail -n 100 -- "$metrics")" \
                "$(cat -- "$folder/summary.json" 2>/dev/null || true)"
        done
}

nvitop() {
    have nvidia-smi || fail "nvidia-smi is not there, so there is no NVIDIA GPU to watch: just status shows the machine"
    exec uv tool run nvitop "$@"
}

version() { if have "$1"; then "$@"; else echo "$1 is not there: run just bootstrap-remote"; fi; }

status() {
    local gpus built='not yet: run just build-remote' settings launch command shown state=''
    gpus=$(nvidia-smi --query-gpu=name,memory.used,memory.total,utilization.gpu --format=csv,noheader 2>/dev/null) || gpus=''
    [[ ! -x .venv/bin/diffusionlm-train ]] || built=$(.venv/bin/python --version)
    settings=$(find env -maxdepth 1 -name '*.env' -type f | LC_ALL=C sort | tr '\n' ' ')
    launch=$(last_launch)
    ! alive "$launch" || state="$(<"$launch/session") runs"
    printf '%-10s%s\n' machine "$HOSTNAME, $(nproc) cores" \
        root "$root, $(df -h --output=avail . | tail -n 1 | tr -d ' ') free" \
        tree "$(cat .remote/tree 2>/dev/null || echo 'not sent yet: run just bootstrap-remote')" \
        tools "$(version uv --version), $(version just --version), $(version tmux -V)" built "$built" \
        GPU "${gpus:-none: with run.device = \"auto\" it trains on the CPU}" \
        env "${settings:-no settings: just sync-env sends env/*.env}" session "${state:-$session does not run}"
    [[ -n $launch ]] || return 0
    mapfile -d '' -t command <"$launch/command"
    printf -v shown '%q ' "${command[@]}"
    [[ -z $state ]] || state='goes on'
    [[ ! -e $launch/code ]] || state="ended with exit code $(<"$launch/code")"
    printf '%-10s%s\n' 'last run' "$shown" '' "${state:-ended without an exit code: killed, or the machine went down}" \
        '' "$(tail -n 1 "$launch/log")"
}

if [[ $action != bootstrap && $action != root ]]; then
    [[ -d $root/.remote ]] ||
        fail "$root was not made by just bootstrap-remote: run it, or set REMOTE_ROOT to where it was made"
    cd -- "$root"
fi
"$action" "$@"
