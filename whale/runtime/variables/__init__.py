"""Who holds which part of which variable, and how it came to hold it."""
