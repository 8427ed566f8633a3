"""Contains the passes that turn a captured program into a plan; ``whale.passes.pass_manager`` lists them in order."""
