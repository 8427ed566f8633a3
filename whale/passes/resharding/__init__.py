"""Changes of layout made explicit: what moves, what travels together, in which type, and who carries it."""
