"""The rank processes of one node: pool (forks, forwards output, stops), rank_main (the program of a forked rank),
process_tree (no process outlives its job). Called by `agent` and `spawn`."""
