"""Tuning what is continuous in a finished mix against the original model."""
