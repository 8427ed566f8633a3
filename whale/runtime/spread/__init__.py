"""From a normalised program to what each rank runs: plans over meshes, stages and time, and their lowering."""
