"""Lets ranks go on when others are slower or gone: divides rows anew, and keeps copies of what only one rank has."""
