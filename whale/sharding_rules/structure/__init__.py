"""Rules of ops that move elements about or hold them: shapes, slices, gathers, variables, lists, sources and sinks."""
