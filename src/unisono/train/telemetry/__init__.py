"""Records of a run.

    progress       what rank 0 prints
    run_folder     files that `unisono report` reads
    loggers        TensorBoard, W&B, MLflow
    step_profile   memory and communication of one step; step_program: its ops; step_trace: torch's profiler
    straggler      which rank the others wait for

Called by fit.
"""
