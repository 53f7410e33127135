#!/bin/bash
# The document's script: eight ranks by MPI. `unisono run --backend mpi` finds the environment's mpiexec by itself.
#
# examples/seeds/003_mindspore/run_with_mpi.sh
#
# The log is runs/quickstart/device/train.log.
cd "$(dirname "$0")/../../.." || exit 1
mkdir -p runs/quickstart/device
mpiexec -n 8 python examples/seeds/003_mindspore/net.py >runs/quickstart/device/train.log 2>&1
