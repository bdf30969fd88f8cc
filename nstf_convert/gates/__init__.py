"""Accuracy gates: an artifact measured against its reference (`evaluate`), the verdict as JUnit XML (`junit`)."""
