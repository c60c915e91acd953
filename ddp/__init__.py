"""Many ranks: process group, gradients summed while the backward runs, sharded optimizer state, FSDP2."""
