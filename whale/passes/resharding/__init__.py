"""Makes changes of layout explicit: lists the reshards, fuses them, and chooses their wire type and backend."""
