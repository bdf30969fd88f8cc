"""What a stored matrix costs in time on a target: measured here by the runtime's kernels, or by a model of the processor.

targets.py   names of targets, and which formats each holds natively
atoms.py     a stored tree as the leaves whose products are timed
measure.py   seconds of those leaves on this processor
cache.py     the measurements, kept for the next conversion
model.py     seconds of leaves on a processor that is not here
prices.py    seconds of any tree on one target or several
token.py     tokens a second of a whole file
"""
