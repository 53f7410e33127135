"""The orders in which ranks of a pipeline work, one file a family of schedules."""
