"""The proof that a plan gives the result of one device.

Read in this order:

training_record   everything that must not depend on the plan, recorded on one device and under the plan
reference         the process that makes the record of one device
compare           the deviations between two records, and the verdict
verify            starts the ranks and compares, many plans one after the other
run_errors        plans without a verdict: refused, or failed
first_divergence  the first module that differs, and what the fault looks like
float64           keeps float64 models in float64
mesh_program      the same for distributed programs on a mesh
plan_grid         the plans of `--plan all`, and their table; command: `unisono verify`

self_check proves a plan at the start of each run, on the user's own model: fingerprint is one step in a few numbers a
tensor, rewind undoes a step.
"""
