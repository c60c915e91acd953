#!/usr/bin/env bash
if [[ "$*" == *--print-config* ]]; then
    [[ "$*" != *slow* ]] || sleep 1
    printf '[run]\ndirectory = "runs/stub"\n'
    exit
fi
mkdir -p runs/stub
if [[ "$*" == *hold* ]]; then
    echo held
    until [[ -e "runs/stub/${!#}" || ! -d runs ]]; do sleep 0.05; done
    exit 7
fi
if [[ "$*" == *deaf* ]]; then
    trap '' TERM
    setsid sleep 600 &
    echo $! > runs/stub/rank
    while [[ -d runs ]]; do sleep 0.1; done
fi
printf 'argument: %s\n' "$@"
[[ -z ${TOKEN-} ]] || echo "token: $TOKEN"
lines=1
end=0
for word in "$@"; do
    [[ $word != lines=* ]] || lines=${word#lines=}
    [[ $word != end=* ]] || end=${word#end=}
done
trap 'echo saved; exit 143' TERM
[[ "$*" != *nothing* ]] || { rm -r runs/stub; exit "$end"; }
printf '{"step": 7, "metrics": {"loss": 2.5}}\n{"step": 8, "metr' > runs/stub/metrics.jsonl
for ((line = 1; line <= lines; line++)); do
    echo "line $line"
    sleep 0.1
done
exit "$end"
