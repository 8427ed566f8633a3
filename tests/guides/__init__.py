"""Programs as guides and libraries have them, on ranks and alone: ``python -m tests.guides``."""
