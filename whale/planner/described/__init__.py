"""A described model in the planner: by measured tables, and whether a spread of it is one at all."""
