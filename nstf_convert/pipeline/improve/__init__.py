"""What makes a plan better by measuring it: front to back, search, the comparison with one format for all."""
