"""What the command line and its public twins ask of the runtime: plans without processes, checks, reports."""
