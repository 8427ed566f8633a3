"""Reports plans as files, text tables and HTML pages, and compares them with measurements."""
