"""The proof that a plan gives the result of one device.

Read in this order: `task` (what is proved), `record` (everything that must not depend on the plan, made on one device
and under the plan), `reference` (the process that makes the one on one device), `verdict` (how far two records are
apart), `verify` (starts the ranks, compares, many plans in turn), `ending` (plans that come to no verdict), then
`first_divergence` (the first module that differs, and what the fault looks like). `float64` keeps float64 models in
float64. `on_mesh`, `program_record` and `program_divergence` do the same for distributed programs. `command` is
`unisono verify`; `plan_shapes` and `plan_grid` list and print the plans of `--plan all`.

`self_check` proves a plan at the start of each run, on the user's own model: `fingerprint` is one step in a few numbers
a tensor, `rewind` undoes a step, `reduced` is a model with fewer blocks.
"""
