"""Operations of a rank's program that products of matrices do faster on processors."""
