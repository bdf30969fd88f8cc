"""Kernels in plain torch: they run on every device and define what the faster ones must give."""
