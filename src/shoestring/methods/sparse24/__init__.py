"""2:4 weights: two of every four are zero, in training, in pruning and in serving (README.md)."""
