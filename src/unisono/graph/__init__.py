"""The model as a graph of ops, and how each op may lie on a mesh."""
