"""One choice per tensor under a byte budget: convex hulls, a Lagrangian search, an exact finish."""

from nstf_convert.planner.allocation import Allocation, Infeasible, TooSlow, allocate
from nstf_convert.planner.hull import Option, lower_hull, pareto

__all__ = ["Allocation", "Infeasible", "Option", "TooSlow", "allocate", "lower_hull", "pareto"]
