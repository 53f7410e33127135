"""How work is split: plans, pipeline schedules, and what they cost."""
