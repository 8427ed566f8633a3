"""One run of Whale in this process: its context, communicators, watch, trace."""
