"""Pictures of runs: one HTML file that opens anywhere, and a trace for timeline viewers."""
