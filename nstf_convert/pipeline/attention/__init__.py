"""Attention plans: contexts to measure on, the profile, the choice, and the pass that measures a plan.

contexts.py    contiguous text at the length that will be used, split into choose and report
simulate.py    a model that attends as a plan says, the cache quantised and read back; nothing is fast here
profile.py     expected loss of every option of every head and KV group, from gradients of the end loss
options.py     what a KV group can be, its bytes and its expected loss
choose.py      a budget to a plan: hulls, multipliers, exact program, rivals, measured
retrieval.py   passkeys and needles
possible.py    what is refused before anything takes long: models, lengths, memory
plan.py        the stage of a conversion
"""
