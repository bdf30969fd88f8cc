"""Results on disk by content address; what makes a resumed conversion the same conversion."""
