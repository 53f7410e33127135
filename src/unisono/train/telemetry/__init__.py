"""Records of a run: progress (what rank 0 prints), run_folder (files that `unisono report` reads), step_profile (memory
and communication of one step), step_program (its ops), straggler (which rank the others wait for). Called by fit."""
