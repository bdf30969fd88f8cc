"""One candidate a tensor, under the budget of bytes or the bound on the loss."""
