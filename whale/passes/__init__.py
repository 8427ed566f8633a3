"""The passes between a captured program and a plan, in one visible order."""
