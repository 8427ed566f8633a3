"""How every tensor lies: propagation, choice under split scopes, where partial sums are reduced, what is per rank."""
