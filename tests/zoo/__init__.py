"""Small single-device training programs, one file per family. They use TensorFlow only and never import whale."""
