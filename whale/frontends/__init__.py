"""Programs written for other interfaces than ``wh.function`` and ``wh.Session``, brought to the engine as they are."""
