"""Recomputation: activations that are dropped in the forward and computed again in the backward.

    recompute.py   which modules or ops, and code that runs again (attention, full, patterns)
    selective.py   single cheap ops that run again (selective); the policy is in plan/profile/selective.py

Called by `parallel.compose`; in compiled regions, the compiler chooses what is cheap (parallel/compile).
"""
