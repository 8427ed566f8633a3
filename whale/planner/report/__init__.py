"""Plans of the planner as files, tables, pages, and beside what was measured."""
