"""unisono's parts as plugins of other frameworks.

    pennylane/   the device `qml.device("unisono.qubit")`: QNodes on the circuit simulator of unisono.quantum
    qiskit/      a backend, a sampler and an estimator for circuits of Qiskit
    ranks.py     what these two share: the ranks of the job, and programs compiled for them
    hf.py        `UnisonoTrainer`: transformers.Trainer, whose steps run under a plan
    lightning.py `UnisonoStrategy`: lightning.Trainer, whose model runs under a plan
    ray.py       `run`: a function on ranks that are actors of Ray, with restarts
    optimizer_template.py   for hf and lightning: the optimizer of the plain model, made again for that under the plan

Each imports its framework, which is an optional package. Nothing in unisono imports this folder: users do, or the
frameworks find it through the entry points of pyproject.toml.
"""
