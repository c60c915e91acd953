# shellcheck shell=bash
# Watch the GPUs.
# shellcheck source=scripts/remote/there/prelude.sh
: "${root:?}" "${session:?}"
enter
have nvidia-smi || fail "nvidia-smi is not there, so there is no NVIDIA GPU to watch: just status shows the machine"
exec uv tool run nvitop "$@"
