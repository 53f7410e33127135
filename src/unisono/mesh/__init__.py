"""Where tensors live: ranks in a grid, placements on it, moves between placements, and numbers that ignore both."""
