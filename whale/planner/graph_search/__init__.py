"""The search for the fastest way to spread a captured program."""
