# shellcheck shell=bash
# What is there, for people.
# shellcheck source=scripts/remote/there/prelude.sh
: "${root:?}" "${session:?}"
enter

version() {
    if have "$1"; then "$@"; else echo "$1 is not there: run just bootstrap-remote"; fi
}

gpus() {
    local lines
    if have nvidia-smi && lines=$(nvidia-smi --query-gpu=name,memory.used,memory.total,utilization.gpu \
        --format=csv,noheader 2>/dev/null) && [[ -n $lines ]]; then
        printf '%s\n' "$lines"
    else
        echo 'none: with run.device = "auto" it trains on the CPU'
    fi
}

printf 'machine   %s, %s cores\n' "$HOSTNAME" "$(nproc)"
printf 'root      %s, %s free\n' "$root" "$(df -h --output=avail . | tail -n 1 | tr -d ' ')"
printf 'tree      %s\n' "$(cat .remote/tree 2>/dev/null || echo 'not sent yet: run just bootstrap-remote')"
printf 'tools     %s, %s, %s\n' "$(version uv --version)" "$(version just --version)" "$(version tmux -V)"
if [[ -x .venv/bin/diffusionlm-train ]]; then
    printf 'built     %s\n' "$(.venv/bin/python --version)"
else
    printf 'built     not yet: run just build-remote\n'
fi
gpus | sed '1s/^/GPU       /; 1!s/^/          /'
settings=()
for file in env/.env env/*.env; do
    [[ ! -f $file ]] || settings+=("$file")
done
printf 'env       %s\n' "${settings[*]:-no settings: just sync-env sends env/*.env}"
launch=$(last_launch || true)
if alive "$launch"; then
    printf 'session   %s runs\n' "$(<"$launch/session")"
else
    printf 'session   %s does not run\n' "$session"
fi
if [[ -n $launch ]]; then
    mapfile -d '' -t command <"$launch/command"
    printf -v shown '%q ' "${command[@]}"
    printf 'last run  %s\n' "$shown"
    if [[ -e $launch/code ]]; then
        printf '          ended with exit code %s\n' "$(<"$launch/code")"
    elif alive "$launch"; then
        printf '          goes on\n'
    else
        printf '          ended without an exit code: killed, or the machine went down\n'
    fi
    printf '          %s\n' "$(tail -n 1 "$launch/log")"
fi
