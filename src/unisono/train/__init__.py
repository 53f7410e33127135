"""Training: tasks, and the proof that a plan changes nothing."""
