"""Marks instead of a plan: apply_marks (marked) and to_static."""
