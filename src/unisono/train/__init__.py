"""Training: `uni.Engine`, its data, its checkpoints and its records.

    engine         Engine: chooses and applies a plan, then fit, evaluate, predict, save, load
    fit            the training loop; callbacks: StepInfo and Callback; nonfinite, preemption: how a run stops early
    ema            EMA: averaged weights, for evaluation and export
    evaluation     loss and metrics over a dataset, predictions; metrics: Accuracy, Perplexity; metric_sums: of a batch,
                   in evaluations and in training steps
    data/          Loader: global batches of which each rank reads its part
    checkpoint/    Checkpoints that any plan can load, export and import of weights
    telemetry/     progress, run folder, profile and program of a step, stragglers

Read in this order. Called by user scripts; `report` reads the run folder.
"""
