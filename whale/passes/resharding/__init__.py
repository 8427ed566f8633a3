"""Makes changes of layout explicit: what moves, what travels together, in which type, and which backend carries it."""
