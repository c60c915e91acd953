# shellcheck shell=bash
# Make the root and its folders, and see to uv, just and tmux. What is there already stays as it is.
# shellcheck source=scripts/remote/there/prelude.sh
: "${root:?}" "${session:?}"

install_uv() {
    echo "uv is not there: installing it into $root/.tools"
    if have python3 && python3 -m pip install --quiet --upgrade --target .tools/uv uv; then
        return
    fi
    if have curl && curl -LsSf https://astral.sh/uv/install.sh | UV_UNMANAGED_INSTALL=$root/.tools/bin sh; then
        return
    fi
    fail "uv cannot be installed: python3 -m pip install --user uv must work there, or https://astral.sh be reached"
}

install_tmux() {
    local manager command=() as_root=()
    for manager in apt-get dnf yum apk zypper pacman; do
        if have "$manager"; then
            command=("$manager" install -y tmux)
            [[ $manager != apk ]] || command=(apk add tmux)
            [[ $manager != pacman ]] || command=(pacman -S --noconfirm tmux)
            break
        fi
    done
    [[ ${#command[@]} -gt 0 ]] || fail "tmux is not there, and no package manager that is known: install it"
    [[ $EUID -eq 0 ]] || as_root=(sudo -n)
    echo "tmux is not there: ${command[*]}"
    if [[ ${command[0]} == apt-get ]]; then
        "${as_root[@]}" apt-get update -qq >&2 || true
    fi
    if ! "${as_root[@]}" "${command[@]}" >&2 || ! have tmux; then
        fail "tmux cannot be installed from here: on that machine, run: sudo ${command[*]}"
    fi
}

for tool in tar sha256sum find stat tail grep flock; do
    have "$tool" || fail "$tool is not there: install it"
done
[[ ! -e $root || -d $root ]] || fail "REMOTE_ROOT = $root is a file: name a directory"
said=$(mkdir -p -- "$root" 2>&1) || fail "REMOTE_ROOT = $root cannot be made: name a directory that may be written (${said##*: })"
cd -- "$root" || exit
if [[ ! -d .remote && -n $(ls -A) ]]; then
    fail "REMOTE_ROOT = $root holds other files: name a new or empty directory"
fi
said=$(mkdir -p .remote/launches .tools/bin data runs env 2>&1) || fail "REMOTE_ROOT = $root cannot be written: ${said%%$'\n'*}"

have uv || install_uv
if ! have just; then
    echo "just is not there: installing it into $root/.tools"
    UV_TOOL_DIR=$root/.tools/tools UV_TOOL_BIN_DIR=$root/.tools/bin uv tool install --quiet rust-just ||
        fail "just cannot be installed: uv tool install rust-just fails there"
fi
have tmux || install_tmux
echo "$root: $(uv --version), $(just --version), $(tmux -V)"
