"""The conversion side of nstf: command line, checkpoint readers, pipeline, planner, gates and reports."""
