"""Accuracy gates: an artifact measured against its reference, and the verdict as JUnit XML."""
