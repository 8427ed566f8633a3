"""Begins, describes and ends one run of Whale in this process: its context, scopes and saved plan."""
