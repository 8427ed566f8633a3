#!/bin/bash
# sbatch examples/deploy/slurm.sh train.py --epochs 3
# Two nodes, two ranks on each, eight cores for a rank.
#SBATCH --job-name=whale
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
#SBATCH --requeue
set -euo pipefail

source .venv/bin/activate
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK TF_NUM_INTRAOP_THREADS=$SLURM_CPUS_PER_TASK TF_NUM_INTEROP_THREADS=2

# srun starts the ranks, and wh.init() finds its place in SLURM's variables. MPI has to be one that SLURM can start:
# `srun --mpi=list` shows what it knows; Open MPI wants pmix.
if [ "${LAUNCHER:-srun}" = srun ]; then
    exec srun --mpi=pmix --kill-on-bad-exit=1 --cpu-bind=cores python "$@"
fi

# LAUNCHER=whale sbatch ...: `whale run` starts them by ssh, and has faults, restarts, traces and metrics.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed "s/\$/:$SLURM_NTASKS_PER_NODE/" | paste -sd,)
exec whale run -np "$SLURM_NTASKS" --hosts "$hosts" --threads "$SLURM_CPUS_PER_TASK" --max-restarts 3 "$@"
