#!/usr/bin/env bash
# What the tmux session executes, in the root: the training of a launch, with its output in `log` and its end in `code`.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../../.."
launch=$1
echo $$ >"$launch/shell"
mapfile -d '' -t command <"$launch/command"

# A signal is for the training, which saves first: the shell and tee wait for it.
trap : INT TERM HUP

train() (
    trap - INT TERM HUP
    echo "$BASHPID" >"$launch/pid"
    exec .venv/bin/python -I scripts/remote/environment.py ".venv/bin/${command[0]}" "${command[@]:1}"
)

# Of a disk that is full tee complains; how the training ends counts all the same.
{
    code=0
    train 2>&1 || code=$?
    echo "$code" >"$launch/code.part"
} | tee -i "$launch/log" || true
mv -- "$launch/code.part" "$launch/code"
