"""How codes and scales are chosen: `nearest` (each weight alone) and `ldlq` (error feedback).

Both work for every scalar format through `Levels`, which says what values a code can take and how a scale
is stored.
"""
