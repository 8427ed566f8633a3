"""Ranks that go on when others are slower or gone: rows divided anew, copies of what only one rank has."""
