"""Reports plans as files, tables and pages, and compares them with measurements."""
