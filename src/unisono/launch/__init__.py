"""Starts ranks and ends them: `unisono run` and `uni.spawn`.

    command          `unisono run`: options -> job.LaunchJob (hosts: host lists and placement; environment: variables)
    scheduler        nodes with launchers of their own: Slurm's tasks, Kubernetes' pods, torchrun's options
    foreign_options  options of torchrun and of Paddle's launcher, in terms of the command's own
    launcher         runs a LaunchJob: preflight, one agent a node, restarts without lost hosts; mpi_launcher: mpiexec
    transport/       how the launcher reaches its agents: wire, links, ssh, mpiexec, preflight checks
    agent/           the process on each node that runs its ranks: torch's elastic agent
    store/           the job's secret, and the key-value store for those who know it
    tunnel/          --encrypt: what ranks of different hosts say, through a tunnel of each host
    worker/          the rank processes: worker pool, main program of a rank
    outcome/         how a job ends: monitor, failure records, which failure is shown
    console          output of the job for the user
    spawn            ranks forked from this process, without agents; notebook: cells that run on ranks
    process_threads  stacks, OpenMP and scheduling of threads
    completion       `unisono completion`: scripts for shells, made from the parsers of all commands

Read in this order. Called by the command line and by scripts; inside a rank, `comm` and `train` use environment,
process_threads and outcome.failure.
"""
