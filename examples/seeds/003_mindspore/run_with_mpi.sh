#!/bin/bash
# The document's script: eight ranks by MPI. `mpiexec` is that of the environment; `unisono run --backend mpi` finds it too.
cd "$(dirname "$0")/../../.." || exit 1
mkdir -p runs/quickstart/device
mpiexec -n 8 python examples/seeds/003_mindspore/net.py >runs/quickstart/device/train.log 2>&1
