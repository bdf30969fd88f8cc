"""One choice per tensor under a byte budget: convex hulls, a Lagrangian search, an exact finish."""

from nstf_convert.planner.allocation import Allocation, Infeasible, allocate
from nstf_convert.planner.hull import Option, lower_hull, pareto

__all__ = ["Allocation", "Infeasible", "Option", "allocate", "lower_hull", "pareto"]
