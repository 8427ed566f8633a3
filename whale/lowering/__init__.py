"""Lowering: program + plan + rank -> that rank's program (IR), and from there TensorFlow's GraphDef."""
