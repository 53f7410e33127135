"""The rank processes of one node: pool (forks, forwards output, stops), rank_main (the program of a forked rank),
preload (what is imported before the fork), process_tree (no process outlives its job), stacks (of a running rank, for
`unisono attach`), aliases (import names that stand for unisono's modules). Called by `agent` and `spawn`."""
