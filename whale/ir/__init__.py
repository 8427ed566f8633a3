"""The intermediate representation: programs, layouts, plans, their text forms. Imports nothing of the project."""
